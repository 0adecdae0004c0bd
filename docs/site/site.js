// Whatever is wider than its place scrolls: it is reached by keyboard, and its right edge fades where something is cut.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const places = document.querySelectorAll(".content :is(pre, .table-wrapper, p:has(> img))");
  const look = (place) => {
    const wider = place.scrollWidth > place.clientWidth + 1;
    if (wider) place.tabIndex = 0;
    else place.removeAttribute("tabindex");
    place.classList.toggle("cut", wider && place.scrollLeft + place.clientWidth < place.scrollWidth - 1);
  };
  const sizes = new ResizeObserver((seen) => seen.forEach((each) => look(each.target)));
  places.forEach((place) => {
    place.addEventListener("scroll", () => look(place), {passive: true});
    sizes.observe(place);
  });
});
