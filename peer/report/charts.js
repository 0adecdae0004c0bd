// Shows the values of a chart under the pointer, a finger or the arrow keys. Whatever comes from a run is set as text.
"use strict";
(() => {
  const WRITE = {
    number: (v) => significant(v),
    count: (v) => Math.round(v).toLocaleString("en"),
    percent: (v) => (100 * v).toFixed(1) + " %",
    bytes: (v) => {
      const units = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
      const [factor, unit] = units.find(([f]) => v >= f) || [1, "B"];
      return significant(v / factor) + " " + unit;
    },
    seconds: (v) => v < 60 ? significant(v) + " s" : v < 3600 ? Math.floor(v / 60) + " min " + Math.floor(v % 60) + " s"
      : Math.floor(v / 3600) + " h " + Math.floor(v % 3600 / 60) + " min",
  };
  const NEAR = 14; // Points of the drawing: how close a thin line or a value has to be.

  function significant(v) {
    if (v === 0) return "0";
    return Math.abs(v) >= 1e-4 && Math.abs(v) < 1e7
      ? Number(v.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3}) : v.toExponential(2);
  }

  function axis(text) {
    const [unit, kind, low, high, start, end, ...label] = text.split(" ");
    const [a, b, p, q] = [low, high, start, end].map(Number);
    const value = (at) => kind === "log" ? a * (b / a) ** ((at - p) / (q - p)) : a + (at - p) / (q - p) * (b - a);
    return {value, write: (at) => WRITE[unit](value(at)), label: label.join(" "), unit};
  }

  function readLine(shape) {
    const title = shape.querySelector("title");
    const name = title ? title.textContent : "";
    // The browser's own tooltip would cover ours.
    if (title) title.remove();
    const points = shape.points ? [...shape.points].map((p) => [p.x, p.y])
      : [[shape.cx.baseVal.value, shape.cy.baseVal.value]];
    const style = shape.getAttribute("class").split(" ").pop();
    return {shape, name, points, style, thin: style === "peer"};
  }

  // The point of a line that is nearest to a horizontal position.
  function nearest(points, x) {
    let [low, high] = [0, points.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
  }

  function attach(plot) {
    let [x, y, lines, stops, drawn] = [];

    // Once, and again where a live page has drawn the chart anew.
    function read() {
      if (lines && drawn === plot.dataset.drawn) return;
      drawn = plot.dataset.drawn;
      [x, y] = [axis(plot.dataset.x), axis(plot.dataset.y)];
      lines = [...plot.querySelectorAll(".line, .dot")].map(readLine);
      const leading = lines.filter((line) => !line.thin && line.style !== "baseline");
      const positions = (leading.length ? leading : lines).flatMap((line) => line.points.map((p) => p[0]));
      stops = [...new Set(positions)].sort((a, b) => a - b);
    }

    const box = plot.parentNode.appendChild(document.createElement("div"));
    box.className = "tip";
    box.setAttribute("role", "status");
    box.hidden = true;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor");
    let place = null;
    let marked = null;

    function hide() {
      box.hidden = true;
      cursor.remove();
      if (marked) marked.shape.classList.remove("marked");
      marked = place = null;
    }

    function row(style, name, value) {
      const line = box.appendChild(document.createElement("p"));
      if (style) line.appendChild(document.createElement("i")).className = style;
      line.append(name + " ");
      line.appendChild(document.createElement("b")).textContent = value;
    }

    // `height`: where the pointer is, to choose among thin lines; null with the keyboard.
    function show(at, height) {
      read();
      place = nearest(stops.map((stop) => [stop]), at)[0];
      // A baseline is the same everywhere; of other lines only what was measured near here counts.
      const here = lines.map((line) => ({line, point: nearest(line.points, place)}))
        .filter(({line, point}) => line.style === "baseline" || Math.abs(point[0] - place) <= NEAR);
      const thin = here.filter(({line}) => line.thin);
      let chosen = null;
      if (height !== null && thin.length) {
        chosen = thin.reduce((a, b) => Math.abs(a.point[1] - height) <= Math.abs(b.point[1] - height) ? a : b);
        if (Math.abs(chosen.point[1] - height) > NEAR) chosen = null;
      }
      if (marked) marked.shape.classList.remove("marked");
      marked = chosen && chosen.line;
      if (marked) marked.shape.classList.add("marked");
      box.replaceChildren();
      row("", x.unit === "count" ? x.label : "", x.unit === "count" ? x.write(place) : x.write(place) + suffix());
      for (const {line, point} of here) if (!line.thin) row(line.style, line.name, y.write(point[1]));
      if (chosen) row("peer", chosen.line.name, y.write(chosen.point[1]));
      else if (thin.length && thin.length === here.length) row("peer", thin[0].line.name, y.write(thin[0].point[1]));
      for (const name of ["x1", "x2"]) cursor.setAttribute(name, place);
      const end = plot.dataset.y.split(" ");
      cursor.setAttribute("y1", end[4]);
      cursor.setAttribute("y2", end[5]);
      plot.appendChild(cursor);
      box.hidden = false;
      // Beside the cursor, on the side with more room, and inside the figure.
      const [drawn, figure] = [plot.getBoundingClientRect(), plot.parentNode.getBoundingClientRect()];
      const left = drawn.left - figure.left + place * drawn.width / plot.viewBox.baseVal.width;
      const room = figure.width;
      const wanted = left < room / 2 ? left + 14 : left - 14 - box.offsetWidth;
      box.style.left = Math.max(0, Math.min(wanted, room - box.offsetWidth)) + "px";
      box.style.top = drawn.top - figure.top + 8 + "px";
    }

    const suffix = () => x.unit === "seconds" && x.label.startsWith("virtual") ? " (virtual)" : "";

    function follow(event) {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
      show(point.x, point.y);
    }

    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    // A finger that is lifted leaves too, and somebody reads what it found.
    plot.addEventListener("pointerleave", (event) => event.pointerType === "touch" || hide());
    plot.addEventListener("blur", hide);
    plot.addEventListener("redrawn", () => place === null || show(place, null));
    plot.addEventListener("keydown", (event) => {
      read();
      const index = place === null ? stops.length : stops.indexOf(place);
      const step = event.shiftKey ? 10 : 1;
      const next = {ArrowLeft: index - step, ArrowRight: place === null ? 0 : index + step, Home: 0,
        End: stops.length - 1}[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      show(stops[Math.max(0, Math.min(stops.length - 1, next))], null);
    });
  }

  // A page has many charts with many points: each is read when somebody turns to it.
  function watch(plot) {
    const first = () => {
      for (const kind of ["pointerenter", "focus"]) plot.removeEventListener(kind, first);
      attach(plot);
    };
    for (const kind of ["pointerenter", "focus"]) plot.addEventListener(kind, first);
  }

  // What is wider than its place fades where it is cut.
  const sizes = new ResizeObserver((seen) => seen.forEach(({target}) => fade(target.closest(".scroll"))));
  const fade = (box) => box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  document.querySelectorAll(".scroll").forEach((box) => {
    box.addEventListener("scroll", () => fade(box), {passive: true});
    [box, ...box.children].forEach((each) => sizes.observe(each));
  });

  document.querySelectorAll("svg.plot").forEach(watch);
  // For the script of a live page.
  window.charts = {watch, write: WRITE};
})();
