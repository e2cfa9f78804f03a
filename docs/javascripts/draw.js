"use strict";
// A timeline as a picture. It knows nothing of plans or recordings: `model.js` and `replay.js` make the view,
// `painters.js` has the pens.
//
// A view: {tracks: [track], span, words(time)}. A track is one stage:
//   {rank, name, note, section: heading above it, lanes: [lane], strips: [strip]}
//   a lane: {kind: "compute", bars: [bar], gaps: [{s, l, id}], transfers: [{s, l}]}
//           {kind: "messages" or "collectives", bars: [{s, l, id, sent, label, exposed}]}: of l, the last part that
//           the stage waited
//           {kind: "ghost", bars: [bar]}: thin, the plan beside a run
//   a bar: {s, l, id, parts: [{kind, chunk, mb}]}: a pair has two parts, one above the other
//   a strip: {kind: "held" or "owed", points: [[time, count]], most, cap}
// What is marked: {t, chosen, hover, related: Set, faded: function of a bar, paths: [[{track, s, e}]],
// lines: [{a: {track, t}, b: {track, t}, isFaint}], hideFrom, ask: {track, t}}.

(() => {
  const MM = (globalThis.MM ||= {});
  const TOP = 6, AXIS = 24, SECTION = 24, BIN = 3;
  const HEIGHTS = { messages: 11, collectives: 15, ghost: 6 };
  const STRIP = 13;
  const LEAST_BAR = 6; // below this width on average, bars become a density

  // -- Where everything is --

  function measure(view, width, zoom = 1, isCoarse = false) {
    const names = width < 560 ? 34 : 72, bar = isCoarse ? 32 : 26;
    const layout = { names, width, zoom, bar, chart: width - names - 2, tracks: [], height: 0 };
    let y = TOP;
    for (const track of view.tracks) {
      if (track.section) y += SECTION;
      const place = { top: y, lanes: [], strips: [] };
      for (const lane of track.lanes) {
        const height = lane.kind === "compute" ? bar : HEIGHTS[lane.kind];
        place.lanes.push({ y, height });
        y += height + 2;
      }
      for (const strip of track.strips ?? []) {
        place.strips.push({ y: y + 1, height: STRIP, kind: strip.kind });
        y += STRIP + 2;
      }
      // A finger needs 44 pixels from one stage to the next.
      y = Math.max(y + 8, place.top + (isCoarse ? 46 : 40));
      place.bottom = y;
      layout.tracks.push(place);
    }
    layout.bottom = y;
    layout.height = y + AXIS;
    layout.scale = (layout.chart * zoom) / (view.span || 1);
    const average = averageBar(view);
    layout.period = 2 * average; // of the steady state: a forward and a backward
    layout.isDense = average * layout.scale < LEAST_BAR;
    return layout;
  }

  function averageBar(view) {
    let count = 0, length = 0;
    for (const track of view.tracks) for (const { l } of track.lanes[0].bars) { count++; length += l; }
    return count ? length / count : Infinity;
  }

  // -- The picture --

  function paint(pen, view, layout, marks, colours, shades, scroll = 0) {
    const { names, chart, scale, bar } = layout;
    const look = { pen, view, layout, marks, colours, shades, scale, x: (time) => names + time * scale - scroll, from: scroll / scale, to: (scroll + chart) / scale };
    view.tracks.forEach((track, number) => {
      const place = layout.tracks[number];
      if (track.section) pen.text(0, place.top - 7, track.section, { size: 12, align: "left", bold: true });
      track.lanes.forEach((lane, laneNumber) => drawLane(look, lane, place.lanes[laneNumber]));
      (track.strips ?? []).forEach((strip, stripNumber) => drawStrip(look, strip, place.strips[stripNumber]));
    });
    drawLines(look);
    for (const path of marks.paths ?? []) if (path.length) drawPath(look, path);
    drawAxis(look);
    if (marks.ask) drawQuestion(look);
    if (marks.t !== null) drawNow(look);
    // Names last: bars that were scrolled out of sight pass beneath.
    view.tracks.forEach((track, number) => {
      const { top, bottom } = layout.tracks[number];
      pen.rect(0, top - 4, names, bottom - top + 4, colours.paper);
      if (names < 60) return pen.text(names - 7, top + bar / 2 + 4, String(track.rank), { size: 12, align: "right", bold: true });
      pen.text(0, top + (track.note ? 12 : bar / 2 + 4), track.name, { size: 12, align: "left", bold: true });
      if (track.note) pen.text(0, top + 25, track.note, { size: 10.5, align: "left", fill: colours.quiet });
    });
  }

  const isSeen = ({ from, to }, { s, l }) => s <= to && s + l >= from;

  function drawLane(look, lane, place) {
    if (lane.kind === "compute") drawCompute(look, lane, place);
    else if (lane.kind === "ghost") drawGhost(look, lane, place);
    else drawMessages(look, lane, place);
  }

  function drawCompute(look, lane, { y, height }) {
    const { pen, layout, marks, colours, x, scale } = look;
    pen.rect(layout.names, y, layout.chart, height, colours.track);
    if (layout.isDense && !marks.faded) return drawDensity(look, lane, y, height);
    for (const gap of lane.gaps) {
      if (!isSeen(look, gap)) continue;
      const end = marks.t === null ? gap.s + gap.l : Math.min(gap.s + gap.l, marks.t);
      if (end > gap.s) pen.hatch(x(gap.s), y, (end - gap.s) * scale, height);
      if (marks.chosen === gap.id) ring(look, gap, y, height);
      else if (marks.hover === gap.id) pen.box(x(gap.s) + 1, y + 1, gap.l * scale - 2, height - 2, colours.quiet, 1.5);
    }
    const digits = digitsOf(lane);
    const outlined = [];
    for (const bar of lane.bars) {
      if (!isSeen(look, bar) || marks.hideFrom?.(bar)) continue;
      drawBar(look, bar, y, height, digits);
      if (marks.chosen === bar.id || marks.related?.has(bar.id) || marks.hover === bar.id) outlined.push(bar);
    }
    for (const bar of outlined) outline(look, bar, y, height);
    for (const part of lane.transfers ?? [])
      if (isSeen(look, part) && (marks.t === null || part.s <= marks.t)) pen.rect(x(part.s), y, Math.max(part.l * scale, 1.5), height, colours.transfer);
  }

  // All numbers or none: a size is chosen for the longest.
  const digitsOf = (lane) => String(lane.bars.reduce((most, bar) => Math.max(most, bar.parts[0].mb), 0)).length;

  // Of the number in a bar, or in a half of it; 0 for none.
  function sizeOf(width, height, digits) {
    if (height >= 15 && width >= 7.5 * digits + 3) return 11.5;
    return width >= 5.4 * digits + 1 ? 9 : 0;
  }

  function drawBar({ pen, marks, colours, shades, x, scale }, bar, y, height, digits) {
    const left = x(bar.s), width = bar.l * scale, inset = width > 4 ? 0.6 : 0, w = Math.max(width - 2 * inset, 0.6);
    const isToCome = marks.t !== null && bar.s >= marks.t;
    const isRunning = marks.t !== null && !isToCome && bar.s + bar.l > marks.t;
    const isFaded = Boolean(marks.faded?.(bar));
    const half = height / bar.parts.length;
    bar.parts.forEach((part, number) => {
      const [fill, ink, pattern] = shades[part.kind][part.chunk || 0], top = y + number * half;
      if (isToCome || isRunning || isFaded) pen.rect(left + inset, top, w, half, fill, isFaded ? 0.18 : 0.2);
      if (!isToCome && !isFaded) pen.rect(left + inset, top, isRunning ? Math.max((marks.t - bar.s) * scale - inset, 0.6) : w, half, fill);
      if (!isToCome && !isFaded && !isRunning && w > 9) drawPattern(pen, pattern, left + inset, top + half - 4, w, ink);
      const size = sizeOf(width, half, digits);
      const isDark = !isFaded && (marks.t === null || (!isToCome && (!isRunning || (marks.t - bar.s) * scale > width / 2 + 5)));
      if (size) pen.text(left + width / 2, top + half / 2 + size * 0.36, String(part.mb), { size, fill: isToCome || isFaded ? colours.quiet : isDark ? ink : colours.ink, bold: !isToCome && !isFaded });
    });
  }

  // The moment that is shown: a line from top to bottom. It leaves out the numbers that it would cut through; they get
  // a ground of one colour.
  function drawNow({ view, pen, layout, marks, colours, x, scale }) {
    const at = x(marks.t), numbers = [];
    if (!layout.isDense || marks.faded) view.tracks.forEach((track, number) => track.lanes.forEach((lane, place) => {
      if (lane.kind !== "compute") return;
      const { y, height } = layout.tracks[number].lanes[place], digits = digitsOf(lane);
      for (const bar of lane.bars) {
        if (marks.hideFrom?.(bar)) continue;
        const half = height / bar.parts.length, size = sizeOf(bar.l * scale, half, digits);
        bar.parts.forEach((part, row) => {
          const wide = 0.32 * size * String(part.mb).length + 1.5, middle = y + (row + 0.5) * half;
          const centre = x(bar.s + bar.l / 2);
          if (!size || Math.abs(centre - at) >= wide) return;
          numbers.push([middle - 0.6 * size, middle + 0.6 * size]);
          pen.rect(centre - wide, middle - 0.6 * size, 2 * wide, 1.2 * size, colours.paper);
          pen.text(centre, middle + 0.36 * size, String(part.mb), { size, fill: colours.ink, bold: true });
        });
      }
    }));
    let from = TOP - 4;
    for (const [top, bottom] of [...numbers.sort((a, b) => a[0] - b[0]), [layout.bottom, layout.bottom]]) {
      if (top > from) pen.line(at, from, at, top, colours.mark, 1.5);
      from = Math.max(from, bottom);
    }
  }

  // A second sign of the kind, below the number, for eyes and papers without colours: the table's character.
  function drawPattern(pen, pattern, x, y, w, ink) {
    const count = Math.floor((w - 4) / 6), start = x + (w - 6 * count) / 2;
    if (pattern === "=") pen.path([[x + 2, y + 1], [x + w - 2, y + 1]], ink, 1);
    else if (pattern === "~") pen.path(Array.from({ length: 2 * count + 1 }, (_, n) => [start + 3 * n, y + (n % 2 ? 0 : 2.5)]), ink, 1);
    else if (pattern === "+") for (let n = 0; n < count; n++) pen.rect(start + 6 * n + 2, y, 2, 2, ink);
  }

  // What is chosen has a dark and a light ring: one of the two is seen on every colour.
  function ring({ pen, colours, x, scale }, { s, l }, y, height) {
    const left = x(s), width = Math.max(l * scale, 5);
    pen.box(left - 0.5, y - 1.5, width + 1, height + 3, colours.outer, 3);
    pen.box(left + 1.75, y + 0.75, Math.max(width - 3.5, 1), height - 1.5, colours.inner, 1.5);
  }

  function outline(look, bar, y, height) {
    const { pen, marks, colours, x, scale } = look, left = x(bar.s), width = Math.max(bar.l * scale, 3);
    if (marks.chosen === bar.id) return ring(look, bar, y, height);
    const isRelated = marks.related?.has(bar.id);
    pen.box(left + 0.8, y + 0.8, width - 1.6, height - 1.6, colours.inner, 1.6);
    pen.box(left + 0.8, y + 0.8, width - 1.6, height - 1.6, colours.outer, 1.6, isRelated ? [4, 3] : []);
  }

  // How much of each stretch of time each kind of work takes, from below; the rest is idle.
  function drawDensity(look, lane, y, height) {
    const { pen, layout, marks, shades, scale, from, to, x } = look;
    // Whole periods of the schedule: other stretches would show waves that are not there.
    const perBin = layout.period * Math.ceil(BIN / scale / layout.period), begun = Math.floor(from / perBin) * perBin;
    const count = Math.ceil((to - begun) / perBin);
    const kinds = new Map();
    for (const bar of lane.bars) {
      if (!isSeen(look, bar) || marks.hideFrom?.(bar) || (marks.t !== null && bar.s >= marks.t)) continue;
      for (const part of bar.parts) {
        let bins = kinds.get(part.kind);
        if (!bins) kinds.set(part.kind, (bins = new Float32Array(count)));
        const end = marks.t === null ? bar.s + bar.l : Math.min(bar.s + bar.l, marks.t);
        const share = 1 / bar.parts.length, first = Math.max(0, Math.floor((bar.s - begun) / perBin)), last = Math.min(count - 1, Math.floor((end - begun) / perBin));
        for (let bin = first; bin <= last; bin++) {
          const begin = begun + bin * perBin;
          bins[bin] += (share * Math.max(0, Math.min(end, begin + perBin) - Math.max(bar.s, begin))) / perBin;
        }
      }
    }
    const until = marks.t === null ? layout.chart : Math.min(x(marks.t) - layout.names, layout.chart);
    pen.hatch(layout.names, y, Math.max(until, 0), height);
    const letters = [...kinds.keys()].sort((a, b) => Object.keys(shades).indexOf(a) - Object.keys(shades).indexOf(b));
    for (let bin = 0; bin < count; bin++) {
      let base = y + height;
      const left = Math.max(x(begun + bin * perBin), layout.names), right = Math.min(x(begun + (bin + 1) * perBin), layout.names + layout.chart);
      for (const letter of letters) {
        const tall = Math.min(kinds.get(letter)[bin], 1) * height;
        if (tall > 0.05) pen.rect(left, (base -= tall), right - left, tall, shades[letter][0][0]);
      }
    }
    for (const cell of [...lane.bars, ...lane.gaps])
      if (cell.id === marks.chosen) ring(look, cell, y, height);
      else if (marks.related?.has(cell.id)) outline(look, cell, y, height);
  }

  function drawGhost(look, lane, { y, height }) {
    const { pen, shades, x, scale } = look;
    for (const bar of lane.bars) {
      if (!isSeen(look, bar)) continue;
      bar.parts.forEach((part, number) => pen.rect(x(bar.s) + 0.4, y + (number * height) / bar.parts.length, Math.max(bar.l * scale - 0.8, 0.6), height / bar.parts.length, shades[part.kind][part.chunk || 0][0]));
    }
  }

  // Messages that a stage sends; where they take no time, a tick.
  function drawMessages(look, lane, { y, height }) {
    const { pen, layout, marks, colours, x, scale } = look;
    pen.line(layout.names, y + height - 0.5, layout.names + layout.chart, y + height - 0.5, colours.rule);
    for (const bar of lane.bars) {
      if (!isSeen(look, bar) || (marks.t !== null && bar.s > marks.t) || marks.hideFrom?.(bar)) continue;
      const width = Math.max(bar.l * scale, 2), isFaded = marks.faded?.(bar);
      pen.rect(x(bar.s), y, width, height - 1, lane.kind === "messages" ? colours.transfer : colours.held, isFaded ? 0.2 : 1);
      if (width > 7 * bar.label.length && height > 10) pen.text(x(bar.s) + width / 2, y + height - 2.5, bar.label, { size: 9, fill: colours.inner });
      if (marks.chosen === bar.id) ring(look, bar, y, height - 1);
    }
    // Over all of them: what is in flight may overlap.
    for (const bar of lane.bars) {
      const from = bar.s + bar.l - (bar.exposed ?? 0), isThere = marks.t === null || from <= marks.t;
      if (bar.exposed && isThere && isSeen(look, bar)) pen.rect(x(from), y, Math.max(bar.exposed * scale, 1), height - 1, colours.over, marks.faded?.(bar) ? 0.2 : 1);
    }
  }

  // How many microbatches' activations a stage holds, or weight gradients it owes; above the cap in the colour of trouble.
  function drawStrip({ pen, view, colours, marks, x, from, to, scale }, { points, most, cap, kind }, { y, height }) {
    const top = Math.max(most, cap || 0, 1), base = y + height, tall = (count) => (height * count) / top;
    const until = marks.t === null ? view.span : marks.t;
    pen.line(x(Math.max(0, from)), base + 0.5, x(Math.min(view.span, to)), base + 0.5, colours.rule);
    let count = 0, since = 0;
    const run = (end) => {
      const start = Math.max(since, from), stop = Math.min(end, to);
      if (!count || stop <= start) return;
      pen.rect(x(start), base - tall(count), Math.max((stop - start) * scale + 0.5, 0.6), tall(count), kind === "owed" ? colours.owed : colours.held);
      if (cap && count > cap) pen.rect(x(start), base - tall(count), Math.max((stop - start) * scale, 0.6), tall(count) - tall(cap), colours.over);
    };
    for (const [time, next] of points) {
      if (time >= until) break;
      if (time > since) { run(time); since = time; }
      count = next;
    }
    run(until);
    if (cap) pen.line(x(0), base - tall(cap), x(view.span), base - tall(cap), colours.over, 1, [3, 2]);
  }

  // -- Lines between stages --

  const middleOf = (layout, track) => layout.tracks[track].lanes[0].y + layout.bar / 2;

  function drawLines({ pen, marks, layout, x, colours }) {
    for (const { a, b, isFaint } of marks.lines || []) {
      const down = b.track > a.track ? 1 : -1;
      const from = [x(a.t), middleOf(layout, a.track) + (down * layout.bar) / 2], to = [x(b.t), middleOf(layout, b.track) - (down * layout.bar) / 2];
      if (!isFaint) pen.path([from, to], colours.paper, 4);
      pen.path([from, to], isFaint ? colours.quiet : colours.mark, isFaint ? 1 : 1.8);
      pen.dot(...to, isFaint ? 1.8 : 3, isFaint ? colours.quiet : colours.mark);
    }
  }

  // One line through what waits for what: the critical path, or why a gap is there.
  function drawPath({ pen, layout, x, colours }, path) {
    const low = (track) => layout.tracks[track].lanes[0].y + layout.bar - 5; // below the numbers
    const points = path.flatMap(({ track, s, e }) => [[x(s), low(track)], [x(e), low(track)]]);
    // Where bars are as narrow as their numbers, so is the line.
    const isNarrow = layout.names < 60;
    pen.path(points, colours.inner, isNarrow ? 3.2 : 5);
    pen.path(points, colours.mark, isNarrow ? 1.8 : 2.6);
    pen.dot(...points[0], isNarrow ? 3 : 4.5, colours.mark);
    pen.dot(...points.at(-1), isNarrow ? 2.4 : 3, colours.mark);
  }

  function drawQuestion({ pen, marks, layout, x, colours }) {
    const at = Math.min(x(marks.ask.t) + 4, layout.names + layout.chart - 26), { y } = layout.tracks[marks.ask.track].lanes[0];
    pen.rect(at, y, 26, layout.bar, colours.paper);
    pen.box(at + 1, y + 1, 24, layout.bar - 2, colours.mark);
    pen.text(at + 13, y + layout.bar / 2 + 5, "?", { size: 14, fill: colours.mark, bold: true });
  }

  function drawAxis({ pen, view, layout, x, scale, from, to, colours }) {
    const y = layout.bottom + 1;
    pen.line(layout.names, y, layout.names + layout.chart, y, colours.rule);
    const least = 58 / scale, power = 10 ** Math.floor(Math.log10(least));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least * 0.999) || power;
    for (let number = Math.max(0, Math.ceil(from / tick)); number * tick <= Math.min(to, view.span); number++) {
      const at = x(number * tick), isLast = at > layout.width - 14;
      pen.line(at, y, at, y + 4, colours.rule);
      pen.text(isLast ? layout.width - 2 : at, y + 16, view.words(number * tick), { fill: colours.quiet, align: isLast ? "right" : number ? "center" : "left" });
    }
  }

  // -- What is at a point --

  // The id of the bar or gap there, or of the nearest that is no more than `reach` pixels away; null for none.
  function hit(view, layout, scroll, px, py, reach = 2) {
    const number = layout.tracks.findIndex(({ top, bottom }) => py >= top - 2 && py < bottom - 2);
    if (number < 0 || px < layout.names) return null;
    const { lanes } = view.tracks[number], places = layout.tracks[number].lanes;
    let lane = lanes[0];
    // A finger finds a thin lane also a little below it.
    const below = reach > 10 ? 14 : 0;
    lanes.forEach((other, place) => { if (other.kind !== "ghost" && py >= places[place].y && py <= places[place].y + places[place].height + below) lane = other; });
    const time = (px - layout.names + scroll) / layout.scale;
    let best = null, least = reach / layout.scale;
    for (const cell of [...lane.bars, ...(lane.gaps ?? [])]) {
      const distance = Math.max(cell.s - time, time - cell.s - cell.l, 0);
      if (distance === 0 && cell.l > 0) return cell.id;
      if (distance <= least) [best, least] = [cell.id, distance];
    }
    return best;
  }

  // The whole step, small, and the part of it that is on the screen.
  function minimap(pen, view, width, height, colours, shades, { from, to, names }) {
    const scale = (width - names) / (view.span || 1), pitch = height / view.tracks.length;
    view.tracks.forEach((track, number) => {
      const look = { pen, view, marks: { t: null }, colours, shades, scale, from: 0, to: view.span, x: (time) => names + time * scale, layout: { names, chart: width - names, period: 2 * averageBar(view) } };
      drawDensity(look, { bars: track.lanes[0].bars, gaps: [] }, number * pitch, Math.max(pitch - 1, 1));
    });
    pen.rect(names, 0, from * scale, height, colours.paper, 0.65);
    pen.rect(names + to * scale, 0, Math.max(width - names - to * scale, 0), height, colours.paper, 0.65);
    pen.box(names + from * scale + 1, 1, Math.max((to - from) * scale - 2, 4), height - 2, colours.mark, 2);
  }

  MM.draw = { measure, paint, hit, minimap };
})();
