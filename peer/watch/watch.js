// Shows a run as it changes. Whatever comes from a run is set as text; charts were escaped by the server that drew them.
"use strict";
(() => {
  const MOST_ROWS = 100;
  const CHOSEN_ROWS = 30; // Shown of more.
  const MOST_DRAWN = {peers: 100, edges: 1200}; // Of more, a canvas shows the graph.
  const MOST_NAMED = 24;
  const TROUBLE = new Set(["unreachable", "lost", "diverged"]);
  const OVER = new Set(["finished", "left", "stopped", "not joined"]);
  const SVG = "http://www.w3.org/2000/svg";
  const operates = document.body.dataset.operate === "yes";
  const write = window.charts.write;
  const parts = {run: null, peers: [], edges: [], charts: null, events: [], log: []};
  const changed = new Set();
  const at = (id) => document.getElementById(id);

  // -- words ----------------------------------------------------------------------------------------------------------

  const known = (value) => value !== null && value !== undefined;
  const shown = (unit, value, after = "") => known(value) ? write[unit](value) + after : "–";
  const figure = (value) => shown(parts.run && !parts.run.is_accuracy ? "number" : "percent", value);
  const name = (index) => (peersByIndex.get(index) || {name: "peer " + index}).name;
  let peersByIndex = new Map();

  function set(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function classes(element, value) {
    if (element.getAttribute("class") !== value) element.setAttribute("class", value);
  }

  function make(tag, content, kind) {
    const element = document.createElement(tag);
    if (content !== undefined) element.textContent = content;
    if (kind) element.className = kind;
    return element;
  }

  // -- what comes from the server -------------------------------------------------------------------------------------

  function readPeer([index, name, state, problem, round, loss, figure, payload, rate, budget, waits, waitShare,
    limits, warnings]) {
    const kind = TROUBLE.has(state) ? "down" : OVER.has(state) ? "over" : waits.length ? "waiting" : "up";
    return {index, name, state, problem, round, loss, figure, payload, rate, budget, waits, waitShare,
      limits, warnings, kind};
  }

  function readEdge([a, b, sends, state, problem, rates, late, backlog, leftOut, relayed]) {
    return {a, b, sends, state, problem, rates: rates || [null, null], late: late || [null, null],
      backlog: backlog || [null, null], leftOut: leftOut || [false, false], relayed: !!relayed, planned: !rates};
  }

  function take(block) {
    const lines = block.split("\n");
    const kind = (lines.find((line) => line.startsWith("event: ")) || "").slice(7);
    const data = lines.find((line) => line.startsWith("data: "));
    if (!data || !(kind in parts)) return;
    const value = JSON.parse(data.slice(6));
    parts[kind] = kind === "peers" ? value.map(readPeer) : kind === "edges" ? value.map(readEdge) : value;
    changed.add(kind);
    if (changed.size === 1) requestAnimationFrame(render);
  }

  function say(text, state) {
    set(at("connection"), text);
    classes(at("connection"), "connection " + state);
  }

  // The token stands behind the # of the address. It is kept for this tab, so that the page may be loaded again.
  function readToken() {
    const found = new URLSearchParams(location.hash.slice(1)).get("token");
    if (found) {
      sessionStorage.setItem("token", found);
      history.replaceState(null, "", location.pathname);
    }
    return found || sessionStorage.getItem("token");
  }

  async function follow(token) {
    for (let pause = 500; ; pause = Math.min(5000, 2 * pause)) {
      try {
        const answer = await fetch("/events", {headers: {authorization: "Bearer " + token}, cache: "no-store"});
        if (!answer.ok) {
          say(await answer.text(), "lost");
          if (answer.status === 401) return;
        } else {
          say("live", "live");
          pause = 500;
          const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
          let rest = "";
          for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
            const blocks = (rest + piece.value).split("\n\n");
            rest = blocks.pop();
            blocks.forEach(take);
          }
        }
      } catch {
        // Said below: the server ended, or the device slept.
      }
      if (at("connection").classList.contains("live")) say("sotto watch has ended, or cannot be reached", "lost");
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  // -- rendering ------------------------------------------------------------------------------------------------------

  function render() {
    const began = performance.now();
    const now = new Set(changed);
    changed.clear();
    if (now.has("peers")) peersByIndex = new Map(parts.peers.map((peer) => [peer.index, peer]));
    if (parts.run && (now.has("run") || now.has("peers"))) showRun(parts.run);
    if (now.has("peers") || now.has("run")) showPeers();
    if (now.has("edges") || now.has("peers")) showLinks();
    if (now.has("edges") || now.has("peers") || now.has("run")) drawGraph();
    if (now.has("charts")) showCharts(parts.charts);
    if (now.has("events")) showEvents();
    if (now.has("log")) showLog();
    document.body.dataset.updateMs = (performance.now() - began).toFixed(1);
  }

  function showRun(run) {
    const peers = parts.peers;
    const kinds = {run: "Run on this machine", cluster: "Cluster", peer: "One peer", simulation: "Simulation"};
    set(at("kind"), kinds[run.kind] || "Live");
    set(at("name"), run.name);
    document.title = run.name + " · Sottovoce";
    const count = (n, what) => `${write.count(n)} ${what}${n === 1 ? "" : "s"}`;
    set(at("facts"), count(peers.length, "peer") + (run.ended ? " · ended: " + run.ended : ""));
    at("banner").hidden = !run.note;
    set(at("banner"), run.note || "");
    set(at("round"), shown("count", run.round));
    set(at("round-note"), run.rounds ? "of " + write.count(run.rounds) + ", by every member" : "completed by every member");
    at("progress").max = run.rounds || 1;
    at("progress").value = run.round || 0;
    set(at("left"), run.ended || run.left_s === 0 ? "0 s" : known(run.left_s) ? write.seconds(run.left_s) : "–");
    set(at("left-note"), known(run.left_s) ? "at the pace of the last minute" : "not known yet");
    const worst = peersByIndex.get(run.worst);
    set(at("worst"), worst ? figure(worst.figure) : "–");
    set(at("worst-note"), worst ? `${worst.name}, ${run.criterion}` : "after the first evaluation");
    set(at("average"), figure(run.average));
    set(at("average-note"), known(run.average) ? run.criterion : "no machine has all models");
    set(at("sent"), shown("bytes", run.payload));
    const pace = shown("bytes", run.rate, run.kind === "simulation" ? " per virtual second" : "/s");
    set(at("sent-note"), known(run.budget) ? `fastest link ${shown("bytes", run.link_rate, "/s")} of ` +
      `${write.bytes(run.budget)}/s allowed` : known(run.rate) ? pace : "model updates of all peers");
    set(at("running"), write.count(run.running));
    const others = peers.length - run.running - run.trouble;
    set(at("running-note"), "running" + (run.trouble ? `, ${write.count(run.trouble)} in trouble` : "") +
      (others ? `, ${write.count(others)} ended or not there yet` : ""));
    at("running").parentNode.classList.toggle("bad", run.trouble > 0);
  }

  // Of too many peers those in trouble, the slowest and the worst.
  function chosen() {
    if (parts.peers.length <= MOST_ROWS) return parts.peers;
    const worst = parts.run && parts.run.worst;
    const rank = (peer) => [peer.kind === "down" ? 0 : peer.index === worst ? 1 : 2, known(peer.round) ? peer.round : -1];
    return parts.peers.map((peer) => [rank(peer), peer])
      .sort(([a, p], [b, q]) => a[0] - b[0] || a[1] - b[1] || p.index - q.index).slice(0, CHOSEN_ROWS).map(([, p]) => p);
  }

  // Rows are kept, so that the keyboard's focus stays where it is.
  function fill(body, keys, columns, update) {
    while (body.rows.length > keys.length) body.deleteRow(-1);
    keys.forEach((key, number) => {
      const row = body.rows[number] || body.insertRow();
      while (row.cells.length < columns) row.insertCell().className = row.cells.length > 2 ? "number" : "text";
      update(row, key);
    });
  }

  function showPeers() {
    const run = parts.run;
    if (!run) return;
    set(at("peers-head-4"), run.criterion);
    const rows = chosen();
    fill(at("peers-rows"), rows, operates ? 9 : 8, (row, peer) => {
      classes(row, `${peer.kind}${peer.index === run.worst ? " worst" : ""}`);
      row.dataset.peer = peer.name;
      const waits = peer.waits.map(name).join(", ");
      const share = known(peer.waitShare) ? Math.round(100 * peer.waitShare) + " % of the time" : "";
      [peer.name, null, shown("count", peer.round), shown("number", peer.loss), figure(peer.figure),
        shown("bytes", peer.payload), shown("bytes", peer.rate), waits || share || "–"].forEach((text, column) => {
        if (text !== null) set(row.cells[column], text);
      });
      showState(row.cells[1], peer);
      if (operates) offer(row.cells[8], peer);
    });
    const left = parts.peers.length - rows.length;
    set(at("peers-note"), left ? `${write.count(left)} more peers: shown are those in trouble, the worst, the slowest.` : "");
  }

  function showState(cell, peer) {
    const isUp = peer.kind !== "down" && peer.kind !== "over";
    const why = isUp ? [...peer.limits, ...peer.warnings].join("; ") : peer.problem || "";
    const key = peer.state + "\n" + why;
    if (cell.dataset.key === key) return;
    cell.dataset.key = key;
    cell.replaceChildren(peer.state);
    if (why) cell.appendChild(make("span", why, "why"));
  }

  function edgeKind(edge) {
    const [a, b] = [peersByIndex.get(edge.a), peersByIndex.get(edge.b)];
    if (edge.state !== "up") return edge.state;
    if ((edge.sends & 1 && b && b.waits.includes(edge.a)) || (edge.sends & 2 && a && a.waits.includes(edge.b))) return "awaited";
    return edge.relayed ? "relayed" : "up";
  }

  function ends(edge) {
    const [a, b] = [name(edge.a), name(edge.b)];
    return edge.sends === 2 ? `${b} → ${a}` : `${a} ${edge.sends === 3 ? "↔" : "→"} ${b}`;
  }

  function both(edge, values, unit, after = "") {
    const [forth, back] = values.map((value) => shown(unit, value, known(value) ? after : ""));
    if (edge.sends === 3) return forth === back ? forth : `${forth} → · ← ${back}`;
    return edge.sends === 1 ? forth : back;
  }

  function edgeWords(edge) {
    const kind = edgeKind(edge);
    const words = {awaited: "up, awaited", relayed: "up", unknown: "not known"}[kind] || kind;
    return edge.leftOut.some(Boolean) ? words + ", left out" : words;
  }

  function showLinks() {
    const live = parts.edges.filter((edge) => !edge.planned);
    const order = {down: 0, unknown: 1, up: 2, over: 3};
    const rows = live.slice().sort((p, q) => order[p.state] - order[q.state] || p.a - q.a || p.b - q.b).slice(0, MOST_ROWS);
    fill(at("links-rows"), rows, 6, (row, edge) => {
      classes(row, edge.state === "down" ? "down" : edge.state === "over" ? "over" : "up");
      const words = edgeWords(edge) + (edge.problem ? ": " + edge.problem : "");
      [ends(edge), words, both(edge, edge.rates, "bytes"),
        both(edge, edge.late, "seconds"), both(edge, edge.backlog, "bytes"), edge.relayed ? "through a relay" : "direct",
      ].forEach((text, column) => set(row.cells[column], text));
    });
    at("links-rows").parentNode.hidden = !rows.length;
    const planned = parts.edges.length - live.length;
    set(at("links-note"), live.length > rows.length ? `${write.count(live.length - rows.length)} more links.`
      : planned ? `${write.count(planned)} links of the graph. More is not recorded of each.` : rows.length ? "" : "No links are known.");
  }

  // -- the graph ------------------------------------------------------------------------------------------------------

  const holder = at("drawing");
  const drawing = {kind: null, nodes: new Map(), edges: new Map(), size: 0};

  function place(number, count, size, margin) {
    const turn = 2 * Math.PI * number / count - Math.PI / 2;
    const radius = size / 2 - margin;
    return [size / 2 + radius * Math.cos(turn), size / 2 + radius * Math.sin(turn), Math.cos(turn), Math.sin(turn)];
  }

  function shape(tag, parent, attributes = {}) {
    const element = parent.appendChild(document.createElementNS(SVG, tag));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  function graphWords() {
    const counts = {up: 0, waiting: 0, over: 0, down: 0};
    for (const peer of parts.peers) counts[peer.kind] += 1;
    const down = parts.edges.filter((edge) => edge.state === "down").length;
    return `Graph of ${parts.peers.length} peers and ${parts.edges.length} links: ${counts.up + counts.waiting} peers run, ` +
      `${counts.down} are in trouble, ${counts.over} have ended; ${down} links are down`;
  }

  function drawGraph() {
    const size = Math.max(240, Math.min(holder.clientWidth - 28, 420));
    const many = parts.peers.length > MOST_DRAWN.peers || parts.edges.length > MOST_DRAWN.edges;
    const kind = many ? "canvas" : "svg";
    if (drawing.kind !== kind) {
      drawing.kind = kind;
      const element = many ? make("canvas") : document.createElementNS(SVG, "svg");
      element.setAttribute("role", "img");
      holder.replaceChildren(element);
      drawing.nodes.clear();
      drawing.edges.clear();
    }
    const element = holder.firstChild;
    const words = graphWords();
    if (element.getAttribute("aria-label") !== words) element.setAttribute("aria-label", words);
    if (many) paint(element, size); else draw(element, size);
    const waiting = parts.peers.filter((peer) => peer.waits.length);
    set(at("waiting"), waiting.length ? "Waiting now: " + waiting.slice(0, 12).map((peer) =>
      `${peer.name} for ${peer.waits.map(name).join(", ")}`).join("; ") + (waiting.length > 12 ? "; …" : "") + "." : "");
  }

  function keep(map, keys) {
    for (const [key, element] of map) {
      if (!keys.has(key)) {
        element.remove();
        map.delete(key);
      }
    }
  }

  function draw(svg, size) {
    const peers = parts.peers;
    const named = peers.length <= MOST_NAMED;
    const margin = named ? Math.min(96, size / 4) : 22;
    const room = Math.floor((margin - 20) / 7.5); // Characters beside a peer.
    const layout = `${size} ${peers.map((peer) => peer.index).join(",")}`;
    const moved = drawing.layout !== layout;
    drawing.layout = layout;
    if (!svg.firstChild) {
      const arrow = shape("marker", shape("defs", svg), {id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4,
        markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse"});
      shape("path", arrow, {d: "M0 0 8 4 0 8z", class: "head"});
      drawing.edgeLayer = shape("g", svg);
      drawing.nodeLayer = shape("g", svg);
    }
    if (moved) for (const [key, value] of [["width", size], ["height", size], ["viewBox", `0 0 ${size} ${size}`]]) svg.setAttribute(key, value);
    const places = new Map(peers.map((peer, number) => [peer.index, place(number, peers.length, size, margin)]));
    const fastest = Math.max(1, ...parts.edges.flatMap((edge) => edge.rates.filter(known)));
    const edges = parts.edges.filter((edge) => places.has(edge.a) && places.has(edge.b));
    keep(drawing.edges, new Set(edges.map((edge) => `${edge.a}-${edge.b}`)));
    for (const edge of edges) {
      const key = `${edge.a}-${edge.b}`;
      let line = drawing.edges.get(key);
      if (!line || moved || line.dataset.sends !== String(edge.sends)) {
        if (!line) drawing.edges.set(key, line = shape("line", drawing.edgeLayer));
        const [[x1, y1], [x2, y2]] = [places.get(edge.a), places.get(edge.b)];
        const length = Math.hypot(x2 - x1, y2 - y1) || 1;
        const [dx, dy] = [(x2 - x1) / length * 13, (y2 - y1) / length * 13];
        for (const [k, v] of [["x1", x1 + dx], ["y1", y1 + dy], ["x2", x2 - dx], ["y2", y2 - dy]]) line.setAttribute(k, v.toFixed(1));
        line.dataset.sends = edge.sends;
        if (edge.sends === 1) line.setAttribute("marker-end", "url(#arrow)"); else line.removeAttribute("marker-end");
        if (edge.sends === 2) line.setAttribute("marker-start", "url(#arrow)"); else line.removeAttribute("marker-start");
      }
      classes(line, "edge " + edgeKind(edge));
      const rate = Math.max(...edge.rates.map((each) => each || 0));
      line.setAttribute("stroke-width", edge.planned ? 1 : (1.2 + 2.6 * Math.sqrt(rate / fastest)).toFixed(1));
      if (!line.firstChild) shape("title", line);
      set(line.firstChild, `${ends(edge)}: ${edgeWords(edge)}` +
        (edge.planned ? "" : `, ${both(edge, edge.rates, "bytes", "/s")}`));
    }
    keep(drawing.nodes, new Set(peers.map((peer) => peer.index)));
    for (const peer of peers) {
      let node = drawing.nodes.get(peer.index);
      if (!node) {
        drawing.nodes.set(peer.index, node = shape("g", drawing.nodeLayer));
        shape("title", node);
        shape("circle", node, {class: "ring"});
        shape("circle", node);
        shape("text", node, {class: "mark", dy: "0.35em"});
        shape("text", node, {class: "label", dy: "0.35em"});
      }
      const [title, ring, disc, mark, label] = node.children;
      if (moved || !disc.hasAttribute("cx")) {
        const [x, y, right, down] = places.get(peer.index);
        const radius = peers.length > 60 ? 4 : named ? 9 : 6;
        for (const [each, r] of [[ring, radius + 4], [disc, radius]]) for (const [k, v] of [["cx", x], ["cy", y], ["r", r]]) each.setAttribute(k, v.toFixed(1));
        for (const [k, v] of [["x", x], ["y", y]]) mark.setAttribute(k, v.toFixed(1));
        label.setAttribute("x", (x + right * 17).toFixed(1));
        label.setAttribute("y", (y + down * 22).toFixed(1));
        label.style.textAnchor = right > 0.2 ? "start" : right < -0.2 ? "end" : "middle";
      }
      const isWorst = parts.run && peer.index === parts.run.worst;
      classes(node, `node ${peer.kind}${isWorst ? " worst" : ""}`);
      set(mark, peer.kind === "down" ? "!" : "");
      set(label, !named ? "" : peer.name.length > room ? peer.name.slice(0, room - 1) + "…" : peer.name);
      set(title, `${peer.name}: ${peer.state}${known(peer.round) ? ", round " + peer.round : ""}`);
    }
  }

  function paint(canvas, size) {
    const scale = window.devicePixelRatio || 1;
    const pixels = Math.round(size * scale);
    if (canvas.width !== pixels) {
      canvas.width = canvas.height = pixels;
      canvas.style.width = canvas.style.height = size + "px";
    }
    const style = getComputedStyle(document.documentElement);
    const colour = (key) => style.getPropertyValue(key);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, size, size);
    const places = new Map(parts.peers.map((peer, number) => [peer.index, place(number, parts.peers.length, size, 14)]));
    const strokes = {up: "--peer", relayed: "--relayed", over: "--rule", unknown: "--rule", awaited: "--worst", down: "--bad"};
    const paths = Object.fromEntries(Object.keys(strokes).map((key) => [key, new Path2D()]));
    for (const edge of parts.edges) {
      const [from, to] = [places.get(edge.a), places.get(edge.b)];
      if (!from || !to) continue;
      const path = paths[edgeKind(edge)];
      path.moveTo(from[0], from[1]);
      path.lineTo(to[0], to[1]);
    }
    // Thousands of lines are read as a texture, those in trouble one by one.
    const faint = Math.max(0.12, Math.min(0.7, 300 / (parts.edges.length || 1)));
    for (const [key, path] of Object.entries(paths)) {
      context.globalAlpha = key === "down" || key === "awaited" ? 0.9 : faint;
      context.lineWidth = key === "down" ? 1.5 : 0.7;
      context.strokeStyle = colour(strokes[key]);
      context.stroke(path);
    }
    context.globalAlpha = 1;
    const fills = {up: "--mean", waiting: "--mean", over: "--over", down: "--bad"};
    const radius = Math.max(1.6, Math.min(4, 1.3 * size / parts.peers.length));
    for (const kind of ["over", "up", "waiting", "down"]) {
      context.fillStyle = colour(fills[kind]);
      for (const peer of parts.peers) {
        if (peer.kind !== kind) continue;
        const [x, y] = places.get(peer.index);
        context.beginPath();
        context.arc(x, y, kind === "down" ? radius + 1.5 : radius, 0, 7);
        context.fill();
      }
    }
    const worst = parts.run && places.get(parts.run.worst);
    if (worst) {
      context.strokeStyle = colour("--worst");
      context.lineWidth = 3;
      context.beginPath();
      context.arc(worst[0], worst[1], radius + 5, 0, 7);
      context.stroke();
    }
  }

  // -- curves, events, log --------------------------------------------------------------------------------------------

  function showCharts(charts) {
    for (const [id, html] of Object.entries(charts)) {
      const spot = at(id);
      const drawn = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
      const [old, plot] = [spot.querySelector("svg.plot"), drawn.querySelector("svg.plot")];
      if (!old || !plot) {
        spot.replaceChildren(drawn);
        if (plot) window.charts.watch(plot);
        continue;
      }
      // The plot stays, with the focus and the values that somebody reads off.
      for (const key of ["data-x", "data-y", "aria-label"]) old.setAttribute(key, plot.getAttribute(key));
      old.replaceChildren(...plot.children);
      old.dataset.drawn = Number(old.dataset.drawn || 0) + 1;
      old.dispatchEvent(new Event("redrawn"));
      for (const part of ["figcaption", ".legend"]) {
        const [before, after] = [spot.querySelector(part), drawn.querySelector(part)];
        if (before && after && before.innerHTML !== after.innerHTML) before.replaceWith(after);
      }
    }
  }

  function showEvents() {
    const list = at("event-list");
    const newest = parts.events.slice().reverse();
    const text = (event) => `${event[0]} ${event[1]}`;
    const first = list.firstElementChild && list.firstElementChild.dataset.key;
    const end = newest.findIndex((event) => text(event) === first);
    const added = end < 0 ? newest : newest.slice(0, end);
    if (end < 0) list.replaceChildren();
    for (const event of added.reverse()) {
      const item = make("li", undefined, event[2] ? "trouble" : "");
      item.dataset.key = text(event);
      const time = item.appendChild(make("time", new Date(1000 * event[0]).toLocaleTimeString("en-GB")));
      time.dateTime = new Date(1000 * event[0]).toISOString();
      item.append(event[1]);
      list.prepend(item);
    }
    while (list.children.length > newest.length) list.lastElementChild.remove();
    if (!newest.length) list.replaceChildren(make("li", "Nothing happened since this page's server was started."));
  }

  function showLog() {
    const scroll = at("log-list").parentNode;
    const isAtEnd = scroll.scrollTop + scroll.clientHeight >= scroll.scrollHeight - 4;
    at("log-list").replaceChildren(...parts.log.map(([whose, line]) => {
      const item = make("li");
      item.append(make("b", whose), line);
      return item;
    }));
    if (!parts.log.length) at("log-list").replaceChildren(make("li", "The logs are on the devices, or there is none."));
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  }

  // -- an operator's actions ------------------------------------------------------------------------------------------

  const ACTIONS = {
    stop: ["Stop", "Finish the round, save and end. The others wait for it until it is started again."],
    leave: ["Leave the run", "For good, after handing over its share. The others continue without it."],
    remove: ["Remove as lost", "For good: the others continue without it. Its state no longer belongs to the run."],
    reload: ["Reload its list of peers", "Read [[peers]] of its configuration file again."],
  };
  const FINAL = new Set(["leave", "remove"]);
  let asked = null;

  function offer(cell, peer) {
    cell.className = "text";
    let button = cell.firstElementChild;
    if (!button) {
      button = cell.appendChild(make("button"));
      button.type = "button";
      button.addEventListener("click", () => ask(cell.parentNode.dataset.peer));
    }
    set(button, `Act on ${peer.name}…`);
    button.disabled = ["left", "lost", "finished", "not joined"].includes(peer.state);
  }

  function ask(peer) {
    asked = {peer, action: peer === null ? "stop all" : null};
    set(at("dialog-title"), peer === null ? "Stop all peers" : peer);
    set(at("said"), "");
    at("confirm-name").value = "";
    at("choices").hidden = peer === null;
    at("choices").replaceChildren(at("choices").firstElementChild);
    const state = parts.peers.find((each) => each.name === peer);
    const answers = state && !["unreachable", "connected", "diverged", "stopped"].includes(state.state);
    for (const [action, [label, what]] of peer === null ? [] : Object.entries(ACTIONS)) {
      // Who answers can leave by itself; who does not can only be removed.
      if ((action === "remove") === Boolean(answers)) continue;
      const choice = at("choices").appendChild(make("div", undefined, "choice"));
      const radio = choice.appendChild(make("input"));
      Object.assign(radio, {type: "radio", name: "action", id: "action-" + action, value: action});
      radio.addEventListener("change", () => {
        asked.action = action;
        check();
      });
      choice.appendChild(make("label", label)).htmlFor = radio.id;
      choice.append(make("small", what));
    }
    check();
    at("dialog").showModal();
  }

  function check() {
    const final = FINAL.has(asked.action);
    at("typed").hidden = !final;
    set(at("typed").firstElementChild, `This cannot be undone. Type ${asked.peer} to confirm.`);
    at("confirm").disabled = !asked.action || (final && at("confirm-name").value !== asked.peer);
  }

  async function confirm(token) {
    at("confirm").disabled = true;
    set(at("said"), "Asking…");
    let said;
    try {
      const answer = await fetch("/act", {method: "POST", body: JSON.stringify(asked),
        headers: {"authorization": "Bearer " + token, "content-type": "application/json"}});
      const result = answer.headers.get("content-type").startsWith("application/json") ? await answer.json() : {error: await answer.text()};
      said = result.said || "refused: " + result.error;
    } catch {
      said = "sotto watch cannot be reached";
    }
    set(at("said"), said);
  }

  if (operates) {
    at("stop-all").addEventListener("click", () => ask(null));
    at("cancel").addEventListener("click", () => at("dialog").close());
    at("confirm-name").addEventListener("input", check);
  }

  const token = readToken();
  if (operates) at("confirm").addEventListener("click", () => confirm(token));
  // Sizes and colours of a canvas are not those of the style sheet.
  new ResizeObserver(() => parts.peers.length && drawGraph()).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => parts.peers.length && drawGraph());
  if (token) follow(token);
  else say("this needs the whole address that sotto watch printed", "lost");
})();
