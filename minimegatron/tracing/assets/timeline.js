"use strict";
// The page's program, top to bottom: data, small helpers, the timeline, choosing, details, the table,
// zoom and keys. Times in the data are microseconds from the step's first computation.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { step: 0, zoom: 1, chosen: null, cells: [] };

// -- Small helpers --

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function ms(us) {
  const value = us / 1000;
  if (Math.abs(value) < 0.0005) return "0 ms";
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3;
  return value.toFixed(digits) + " ms";
}

const step = () => DATA.steps[state.step];
const left = (us) => (100 * us) / step().length + "%";
const PHASES = { warmup: "warm-up", steady: "steady state", cooldown: "cool-down" };
const isWork = (event) => event.k in step().words || Boolean(event.q);
const isAction = (event) => isWork(event) || event.k === "communicate";

function eventsOf(rank) {
  const owner = step().ranks[rank];
  if (!owner.byIndex) owner.byIndex = new Map(owner.events.map((event) => [event.i, event]));
  return owner.byIndex;
}

function title(event) {
  if (!isWork(event) || event.q) return event.a || event.n;
  const words = step().words[event.k];
  return `${words[0].toUpperCase()}${words.slice(1)} of microbatch ${event.m}` + chunkWords(event);
}

function chunkWords(event) {
  return step().chunks > 1 ? `, chunk ${event.c}` : "";
}

function waitWords(event) {
  if (!event.w && !event.t) return null;
  return `waited ${ms(event.w || 0)}, transfer ${ms(event.t || 0)}`;
}

// -- The timeline --

function drawStep() {
  const now = step();
  state.cells = [];
  state.chosen = null;
  $("title").textContent = now.title;
  $("paced").textContent = now.paced;
  $("paced").hidden = !now.paced;
  $("clock").textContent = DATA.clock;
  document.title = `${now.title}${now.paced ? ", " + now.paced : ""} | minimegatron trace`;
  $("figures").replaceChildren(...now.figures.map(figure));
  $("names").replaceChildren(...now.ranks.map((owner, rank) =>
    make("div", {}, `stage ${rank}`, make("small", {}, `rank ${owner.rank}`))));
  $("plot").replaceChildren(
    ...now.ranks.map((owner, rank) => drawRow(rank, owner)),
    make("div", { class: "axis", "aria-hidden": "true" }),
    arrowLayer());
  drawLegend();
  $("details").replaceChildren(make("p", { class: "empty" }, "Nothing chosen yet."));
  $("table").replaceChildren();
  if ($("table-twin").open) drawTable();
  rezoom();
}

function figure(entry) {
  return make("div", { class: entry.bad ? "bad" : "" }, make("dt", {}, entry.label),
    make("dd", { class: "value" }, entry.value), make("dd", { class: "remark" }, entry.remark));
}

function drawRow(rank, owner) {
  const row = make("div", { class: "row", role: "group", "aria-label": `Stage ${rank}` });
  const cells = [];
  for (const gap of owner.gaps) cells.push({ rank, gap, at: gap.s, length: gap.l });
  for (const event of owner.events)
    if (isWork(event))
      cells.push({ rank, event, at: event.s, length: event.l });
  cells.sort((a, b) => a.at - b.at);
  for (const cell of cells) row.append(drawCell(cell));
  for (const event of owner.events)
    if (event.n === "_wait_for" && event.t)
      row.append(make("div", { class: "transfer", style: {
        left: left(event.s + event.l - event.t), width: left(event.t) } }));
  // What is exposed stands over all that is in flight: flights may overlap.
  for (const flight of owner.flights)
    row.append(make("div", { class: "flight", title: flight.x, style: { left: left(flight.s), width: left(flight.l) } }));
  for (const flight of owner.flights.filter(({ w }) => w))
    row.append(make("div", { class: "flight exposed", title: flight.x, style: {
      left: left(flight.s + flight.l - flight.w), width: left(flight.w) } }));
  if ($("show-plan").checked)
    for (const planned of owner.plan)
      row.append(make("div", { class: "planned", style: {
        left: left(planned.s), width: left(planned.l), background: colour(planned)[0],
        ...halfOf(planned) } }));
  state.cells.push(cells);
  return row;
}

// The two of a pair start and end together: one below the other.
function halfOf({ h }) {
  if (!h) return {};
  const [place, count] = h;
  return { clipPath: `inset(${(100 * place) / count}% 0 ${100 - (100 * (place + 1)) / count}% 0)` };
}

// A pair has its two parts' colours, the first above.
function colour(action) {
  if (!action.q) return step().colours[action.k][action.c || 0];
  const [[above, text], [below]] = action.q.map(([kind, , chunk]) => step().colours[kind][chunk || 0]);
  return [`linear-gradient(${above} 0 50%, ${below} 50%)`, text];
}

function drawCell(cell) {
  const { rank, event, gap } = cell;
  const style = { left: left(cell.at), width: left(cell.length) };
  if (event) [style.background, style.color] = colour(event);
  const label = event
    ? `Stage ${rank}, ${title(event)}, ${PHASES[event.ph] || ""}, at ${ms(cell.at)}, ${ms(cell.length)} long`
    : `Stage ${rank}, idle at ${ms(cell.at)}: ${gap.x}`;
  cell.node = make("button", {
    type: "button", class: event ? "bar" : "gap", tabindex: "-1", "aria-label": label, style,
    onclick: () => choose(cell), onfocus: () => showTip(cell), onblur: hideTip,
    onmouseenter: (e) => showTip(cell, e), onmousemove: moveTip, onmouseleave: hideTip,
  }, ...(event?.q ? event.q.map(drawHalf) : [event ? String(event.m) : ""]));
  return cell.node;
}

function drawHalf([kind, microbatch, chunk]) {
  return make("span", { class: "half", style: { color: step().colours[kind][chunk || 0][1] } }, String(microbatch));
}

function drawLegend() {
  const now = step();
  const entries = [];
  for (const [kind, words] of Object.entries(now.words)) {
    const isOf = (event) => event.k === kind || event.q?.some(([part]) => part === kind);
    if (!now.ranks.some((owner) => owner.events.some(isOf))) continue;
    now.colours[kind].forEach(([background], chunk) =>
      entries.push([{ background }, now.chunks > 1 ? `${words}, chunk ${chunk}` : words]));
  }
  const hatch = "repeating-linear-gradient(-45deg, transparent 0 4px, var(--hatch) 4px 5.2px) var(--track)";
  entries.push([{ background: hatch }, "idle"], [{ background: "var(--transfer)" }, "transfer"]);
  const flying = new Set(now.ranks.flatMap(({ flights }) => flights.map(({ n }) => n)));
  const what = [["A2A", "all-to-all"], ["HOP", "ring hop"]].filter(([name]) => flying.has(name)).map(([, words]) => words);
  if (what.length)
    entries.push([{ background: "var(--quiet)", height: "5px" }, `above: ${what.join(" or ")} in flight`],
      [{ background: "var(--exposed)", height: "5px" }, "exposed: it is waited for"]);
  if ($("show-plan").checked)
    entries.push([{ background: "var(--quiet)", height: "5px" }, "thin: the plan"]);
  $("legend").replaceChildren(...entries.map(([style, words]) =>
    make("li", {}, make("i", { style }), words)));
}

function drawAxis() {
  const axis = $("plot").querySelector(".axis");
  const width = $("plot").clientWidth;
  const length = step().length / 1000;
  const least = length / Math.max(2, width / 90);
  const power = 10 ** Math.floor(Math.log10(least));
  const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
  const spans = [];
  for (let number = 0; number * tick <= length; number++) {
    const value = number * tick;
    if (number && length - value < tick / 4) break;
    const words = Number(value.toPrecision(6)) + (number ? "" : " ms");
    spans.push(make("span", { class: number ? "" : "first", style: { left: left(value * 1000) } }, words));
  }
  axis.replaceChildren(...spans);
}

// -- Messages --

function arrowLayer() {
  const layer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  layer.id = "arrows";
  layer.setAttribute("aria-hidden", "true");
  return layer;
}

function drawArrows() {
  const layer = $("arrows");
  layer.replaceChildren();
  $("plot").querySelectorAll(".head").forEach((node) => node.remove());
  const rowHeight = $("plot").querySelector(".row").offsetHeight;
  const width = $("plot").clientWidth;
  const height = (rank) => 8 + rowHeight * (rank + 0.5);
  for (const message of step().messages) {
    const isOwn = isAbout(message, state.chosen);
    if (!message.b || (!isOwn && !$("show-messages").checked)) continue;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const goesDown = message.b[0] > message.a[0] ? 1 : -1;
    const ends = [[message.a, 15 * goesDown], [message.b, -15 * goesDown]];
    ends.forEach(([end, shift], number) => {
      line.setAttribute(`x${number + 1}`, (end[2] / step().length) * width);
      line.setAttribute(`y${number + 1}`, height(end[0]) + shift);
    });
    if (!isOwn) line.setAttribute("class", "faint");
    layer.append(line);
    if (isOwn)
      $("plot").append(make("div", { class: "head", style: {
        left: left(message.b[2]), top: height(message.b[0]) - 15 * goesDown + "px" } }));
  }
}

// A message belongs to the work that made it and to the work that used it.
function isAbout(message, cell) {
  if (!cell || !cell.event) return false;
  const { rank, event } = cell;
  if (message.a[0] === rank && message.d === event.i) return true;
  return message.b !== null && message.b[0] === rank && message.u === event.i;
}

// -- Choosing --

function choose(cell, andFocus = false) {
  hideTip();
  state.chosen = cell;
  $("plot").querySelectorAll(".chosen, .related").forEach((node) =>
    node.classList.remove("chosen", "related"));
  cell.node.classList.add("chosen");
  makeReachable(cell);
  if (cell.gap && cell.gap.f) {
    const cause = cellOf(...cell.gap.f);
    if (cause) cause.node.classList.add("related");
  }
  if (andFocus) {
    cell.node.focus({ preventScroll: true });
    reveal(cell);
  }
  drawArrows();
  drawDetails(cell);
  const mark = cell.event ? `&action=${cell.event.i}` : `&gap=${cell.gap.s}`;
  history.replaceState(null, "", `#step=${state.step}&stage=${cell.rank}${mark}`);
}

function makeReachable(cell) {
  state.cells.flat().forEach((other) => other.node.setAttribute("tabindex", "-1"));
  cell.node.setAttribute("tabindex", "0");
}

function cellOf(rank, index) {
  return state.cells[rank].find((cell) => cell.event && cell.event.i === index);
}

function reveal(cell) {
  const view = $("viewport");
  const start = cell.node.offsetLeft, end = start + cell.node.offsetWidth;
  if (start < view.scrollLeft) view.scrollLeft = start - 20;
  else if (end > view.scrollLeft + view.clientWidth - 20) view.scrollLeft = end - view.clientWidth + 40;
}

function showTip(cell, mouse) {
  const { event, gap } = cell;
  const lines = event
    ? [`${ms(event.s)} to ${ms(event.s + event.l)}: ${ms(event.l)}`, PHASES[event.ph]]
    : [gap.x];
  $("tip").replaceChildren(make("b", {}, event ? title(event) : "Idle"),
    ...lines.filter(Boolean).map((line) => make("div", {}, line)));
  $("tip").hidden = false;
  if (mouse) moveTip(mouse);
  else {
    const box = cell.node.getBoundingClientRect();
    placeTip(Math.max(box.left, $("viewport").getBoundingClientRect().left), box.bottom + 6);
  }
}

function moveTip(mouse) { placeTip(mouse.clientX + 12, mouse.clientY + 16); }

function placeTip(x, y) {
  const tip = $("tip");
  tip.style.left = Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 8)) + "px";
  const above = y + tip.offsetHeight > innerHeight - 4;
  tip.style.top = (above ? y - tip.offsetHeight - 44 : y) + "px";
}

function hideTip() { $("tip").hidden = true; }

// -- Details of what was chosen --

function drawDetails(cell) {
  $("details").replaceChildren(...(cell.event ? eventDetails(cell) : gapDetails(cell)));
}

function gapDetails({ rank, gap }) {
  const cause = gap.f && gap.b !== null ? cellOf(...gap.f) : null;
  return [
    make("h2", {}, `Stage ${rank} computes nothing for ${ms(gap.l)}`),
    make("p", {}, gap.x[0].toUpperCase() + gap.x.slice(1) + "."),
    gap.b === null ? null : make("p", {},
      `Waiting: nobody had begun to send. Transfer: the message was on its way. Own work: the program ` +
      `between two computations.`),
    cause ? make("p", {}, jump(cause, `Go to what it waited for: stage ${cause.rank}, ${title(cause.event)}`)) : null,
  ].filter(Boolean);
}

function jump(cell, words) {
  return make("button", { type: "button", class: "link", onclick: () => choose(cell, true) }, words);
}

function eventDetails({ rank, event }) {
  const length = `${ms(event.l)} long` + (step().paced ? " (paced)" : "");
  const facts = [`stage ${rank}`, PHASES[event.ph], `at ${ms(event.s)}`, length];
  return [
    make("h2", {}, title(event)),
    make("p", {}, facts.filter(Boolean).join(", ")),
    make("div", { class: "split" },
      make("div", {}, make("h3", {}, "Call stack, outermost first; open a line to read around it"),
        stackList(event)),
      make("div", {}, ...messageList(rank, event), make("h3", {}, "Calls inside"), callList(rank, event))),
  ];
}

function stackList(event) {
  const frames = DATA.stacks[event.st].map(([key, line]) => frame(key, line, false));
  frames.push(frame(event.so, null, true));
  return make("ol", { class: "frames" }, ...frames);
}

function frame(key, line, isHere) {
  const source = DATA.sources[key];
  if (!source) return make("li", {}, make("code", {}, key));
  const first = Number(key.slice(key.lastIndexOf(":") + 1));
  const file = key.slice(0, key.lastIndexOf(":"));
  const lines = source.t.replace(/\n$/, "").split("\n");
  const shown = line === null ? lines.find((text) => /^\s*(async )?def |^\s*class /.test(text)) : lines[line - first];
  const body = make("details", {}, make("summary", {},
    make("code", {}, source.n.replace(".<locals>", "").split(".").slice(-2).join(".")), " ",
    make("span", { class: "where" }, `${file}:${line || first}`),
    make("code", { class: "line" }, (shown || "").trim())));
  body.addEventListener("toggle", () => {
    if (body.open && !body.querySelector("pre")) body.append(sourceText(lines, first, line));
  });
  if (isHere) body.open = true;
  return make("li", { class: isHere ? "here" : "" }, body);
}

function sourceText(lines, first, line) {
  const text = make("pre", { class: "source", tabindex: "0" }, ...lines.map((words, number) =>
    make("span", { "data-line": first + number, class: first + number === line ? "now" : "" }, words + "\n")));
  requestAnimationFrame(() => {
    const now = text.querySelector(".now");
    if (now) text.scrollTop = now.offsetTop - text.offsetTop - text.clientHeight / 2;
  });
  return text;
}

function messageList(rank, event) {
  const items = [];
  for (const message of step().messages) {
    if (!isAbout(message, { rank, event }) || !message.b) continue;
    const isSent = message.a[0] === rank && message.d === event.i;
    const other = isSent ? message.b[0] : message.a[0];
    const there = cellOf(other, isSent ? message.u : message.d);
    const words = isSent ? `to stage ${other}, there at ${ms(message.b[2])}` : `from stage ${other}, sent at ${ms(message.a[2])}`;
    items.push(make("li", {}, make("span", {}, `${message.x} `, there ? jump(there, words) : words)));
  }
  return items.length ? [make("h3", {}, "Messages"), make("ul", { class: "calls" }, ...items)] : [];
}

function callList(rank, event) {
  const inside = [...eventsOf(rank).values()].filter((other) => other.p === event.i);
  if (!inside.length) return make("p", { class: "empty" }, "None that is traced.");
  return make("ul", { class: "calls" }, ...inside.map((call) => {
    const node = make("li", {},
      make("details", {}, make("summary", {}, make("code", {}, call.n)),
        make("div", { class: "words" }, (call.x || []).join("; "), " ", DATA.sources[call.so] ? call.so : ""),
        waitWords(call) ? make("div", { class: "words" }, waitWords(call)) : null),
      make("span", { class: "time" }, ms(call.l)),
      make("div", { class: "spark", "aria-hidden": "true" }, make("i", { style: {
        left: (100 * (call.s - event.s)) / event.l + "%", width: (100 * call.l) / event.l + "%" } })));
    node.querySelector("details").addEventListener("toggle", ({ target }) => {
      if (target.open && !target.querySelector("ul") && [...eventsOf(rank).values()].some((o) => o.p === call.i))
        target.append(callList(rank, call));
    });
    return node;
  }));
}

// -- The table twin --

function drawTable() {
  if ($("table").childElementCount) return;
  $("table").replaceChildren(...step().ranks.map((owner, rank) => {
    const rows = owner.events.filter((event) => isAction(event)).map((event) =>
      make("tr", {}, make("td", { class: "right" }, ms(event.s)), make("td", { class: "right" }, ms(event.l)),
        make("td", {}, event.k === "communicate" ? event.a : title(event)), make("td", {}, PHASES[event.ph] || ""),
        make("td", {}, waitWords(event) || ""), make("td", {}, (event.x || []).join("; "))));
    const head = ["start", "length", "action", "phase", "waiting", "moved"].map((words, column) =>
      make("th", { scope: "col", class: column < 2 ? "right" : "" }, words));
    return make("table", {}, make("caption", {}, `Stage ${rank} (rank ${owner.rank})`),
      make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  }));
}

// -- Zoom --

function rezoom() {
  $("plot").style.width = 100 * state.zoom + "%";
  $("zoom").textContent = Math.round(100 * state.zoom) + " %";
  drawAxis();
  drawArrows();
  for (const cell of state.cells.flat())
    if (cell.event) cell.node.classList.toggle("tight", cell.node.offsetWidth < 9 * cell.node.textContent.length + 2);
}

function zoomTo(zoom, clientX) {
  const view = $("viewport"), box = view.getBoundingClientRect();
  const x = clientX === undefined ? anchorX(box) : clientX - box.left;
  const place = (view.scrollLeft + x) / $("plot").offsetWidth;
  state.zoom = Math.min(400, Math.max(1, zoom));
  rezoom();
  view.scrollLeft = place * $("plot").offsetWidth - x;
}

// On a narrow screen, begin with bars wide enough to hit.
function zoomToReadable() {
  const widths = state.cells.flat().filter((cell) => cell.event).map((cell) => cell.node.offsetWidth);
  const narrow = widths.sort((a, b) => a - b)[Math.floor(widths.length / 4)] || 1;
  if (narrow < 11) zoomTo(Math.min(6, 11 / narrow));
  $("viewport").scrollLeft = 0;
}

// Without a pointer, zoom around what is chosen, if it can be seen.
function anchorX(box) {
  if (!state.chosen) return box.width / 2;
  const bar = state.chosen.node.getBoundingClientRect();
  const x = (bar.left + bar.right) / 2 - box.left;
  return x > 0 && x < box.width ? x : box.width / 2;
}

$("zoom-in").addEventListener("click", () => zoomTo(state.zoom * 1.5));
$("zoom-out").addEventListener("click", () => zoomTo(state.zoom / 1.5));
$("zoom-fit").addEventListener("click", () => zoomTo(1));
$("viewport").addEventListener("wheel", (wheel) => {
  const isOurs = wheel.ctrlKey || wheel.metaKey || $("timeline").contains(document.activeElement);
  if (!isOurs || Math.abs(wheel.deltaX) > Math.abs(wheel.deltaY)) return;
  wheel.preventDefault();
  zoomTo(state.zoom * Math.exp(-Math.max(-120, Math.min(120, wheel.deltaY)) / 300), wheel.clientX);
}, { passive: false });
$("plot").addEventListener("mousedown", () => $("viewport").focus({ preventScroll: true }));

// -- Keys --

$("timeline").addEventListener("keydown", (key) => {
  if (key.ctrlKey || key.metaKey || key.altKey) return;
  const at = state.cells.flat().find((cell) => cell.node === document.activeElement) || state.chosen || state.cells[0][0];
  const row = state.cells[at.rank], place = row.indexOf(at);
  const moves = {
    ArrowRight: () => row[Math.min(place + 1, row.length - 1)],
    ArrowLeft: () => row[Math.max(place - 1, 0)],
    Home: () => row[0],
    End: () => row[row.length - 1],
    ArrowUp: () => nearest(at, -1),
    ArrowDown: () => nearest(at, 1),
  };
  if (key.key in moves) {
    const next = moves[key.key]();
    makeReachable(next);
    next.node.focus({ preventScroll: true });
    reveal(next);
  } else if (key.key === "+" || key.key === "=") zoomTo(state.zoom * 1.5);
  else if (key.key === "-") zoomTo(state.zoom / 1.5);
  else if (key.key === "0") zoomTo(1);
  else return;
  key.preventDefault();
});

function nearest(cell, direction) {
  const row = state.cells[cell.rank + direction];
  if (!row) return cell;
  const middle = cell.at + cell.length / 2;
  const distance = (other) => Math.max(other.at - middle, middle - other.at - other.length, 0);
  return row.reduce((best, other) => (distance(other) < distance(best) ? other : best));
}

// -- Start --

function openAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const number = Number(wanted.get("step") || 0);
  if (DATA.steps[number]) state.step = number;
  $("steps").value = String(state.step);
  drawStep();
  zoomToReadable();
  const row = state.cells[Number(wanted.get("stage"))];
  const cell = row && row.find((c) => wanted.has("action")
    ? c.event && c.event.i === Number(wanted.get("action"))
    : c.gap && wanted.has("gap") && c.gap.s === Number(wanted.get("gap")));
  if (cell) choose(cell);
  else makeReachable(state.cells[0].find((c) => c.event) || state.cells[0][0]);
}

const isOneTitle = new Set(DATA.steps.map((entry) => entry.title)).size === 1;
$("steps").replaceChildren(...DATA.steps.map((entry, number) =>
  make("option", { value: number }, isOneTitle ? entry.label : `${entry.label}: ${entry.title}`)));
$("steps-label").hidden = DATA.steps.length === 1;
$("steps").addEventListener("change", () => {
  state.step = Number($("steps").value);
  drawStep();
  makeReachable(state.cells[0].find((cell) => cell.event) || state.cells[0][0]);
});
$("show-plan").addEventListener("change", () => {
  const chosen = state.chosen && { ...state.chosen };
  drawStep();
  const again = chosen && state.cells[chosen.rank].find((cell) => cell.at === chosen.at && !cell.event === !chosen.event);
  if (again) choose(again);
});
$("show-messages").addEventListener("change", drawArrows);
$("table-twin").addEventListener("toggle", () => { if ($("table-twin").open) drawTable(); });
addEventListener("resize", rezoom);
openAddress();
