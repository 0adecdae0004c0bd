"""The documentation as its readers meet it: pages that are followed to the letter, and the site built of them."""
