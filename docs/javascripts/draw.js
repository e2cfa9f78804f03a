"use strict";
// A timeline as a picture, once: on a canvas for the page, as SVG for a file. Knows nothing of plans
// or recordings; `player.js` and `replay.js` give it rows of bars, gaps and held microbatches.
//
// A view: {rows: [{name, note, bars: [{s, l, kind, chunk, mb, id}], gaps: [{s, l, id}],
// transfers: [{s, l}], plan: [{s, l, kind, chunk}], held: [[time, count]]}], span, v, most, cap,
// words(time)}. What is marked: {t, chosen, hover, related: Set, critical: Set, lines, hideFrom}.

(() => {
  const MM = (globalThis.MM ||= {});
  const TOP = 6, BAR = 26, THIN = 5, AXIS = 24;

  // -- Colours: the site's own, read once per colour scheme --

  const FALLBACK = {
    ink: "#1c2733", quiet: "#57636f", paper: "#ffffff", track: "#edf0f3", hatch: "#c0c9d1", rule: "#cfd6dd",
    mark: "#c2185b", transfer: "#9b4d86", held: "#6d7f90", over: "#b3261e",
  };

  function readColours(element) {
    const style = getComputedStyle(element);
    const colours = {};
    for (const [name, value] of Object.entries(FALLBACK))
      colours[name] = style.getPropertyValue(`--mmp-${name}`).trim() || value;
    return colours;
  }

  // -- Two painters with the same words --

  function canvasPainter(context, colours) {
    const font = (size, bold) => `${bold ? 650 : 400} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
    let hatching = null;
    return {
      rect(x, y, w, h, fill, alpha = 1) {
        context.globalAlpha = alpha;
        context.fillStyle = fill;
        context.fillRect(x, y, w, h);
        context.globalAlpha = 1;
      },
      box(x, y, w, h, stroke, width = 2) {
        context.strokeStyle = stroke;
        context.lineWidth = width;
        context.strokeRect(x, y, w, h);
      },
      hatch(x, y, w, h) {
        hatching ||= hatchPattern(context, colours);
        context.fillStyle = hatching;
        context.fillRect(x, y, w, h);
      },
      line(x1, y1, x2, y2, stroke, width = 1, dashes = []) {
        context.strokeStyle = stroke;
        context.lineWidth = width;
        context.setLineDash(dashes);
        context.beginPath();
        context.moveTo(x1, y1);
        context.lineTo(x2, y2);
        context.stroke();
        context.setLineDash([]);
      },
      area(points, fill) {
        context.fillStyle = fill;
        context.beginPath();
        points.forEach(([x, y], number) => (number ? context.lineTo(x, y) : context.moveTo(x, y)));
        context.fill();
      },
      dot(x, y, radius, fill) {
        context.fillStyle = fill;
        context.beginPath();
        context.arc(x, y, radius, 0, 7);
        context.fill();
      },
      text(x, y, words, { size = 11, fill = colours.ink, align = "center", bold = false } = {}) {
        const wanted = font(size, bold);
        if (context.font !== wanted) context.font = wanted;
        context.textAlign = align;
        context.fillStyle = fill;
        context.fillText(words, x, y);
      },
    };
  }

  function hatchPattern(context, colours) {
    const tile = document.createElement("canvas");
    const scale = context.getTransform().a;
    tile.width = tile.height = Math.round(6 * scale);
    const pen = tile.getContext("2d");
    pen.scale(tile.width / 6, tile.width / 6);
    pen.strokeStyle = colours.hatch;
    pen.lineWidth = 1.1;
    for (const shift of [-6, 0, 6]) {
      pen.beginPath();
      pen.moveTo(shift - 1, 7);
      pen.lineTo(shift + 7, -1);
      pen.stroke();
    }
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(6 / tile.width));
    return pattern;
  }

  function svgPainter(colours) {
    const parts = [], n = (value) => Number(value.toFixed(2));
    const escape = (words) => String(words).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
    return {
      parts,
      rect: (x, y, w, h, fill, alpha = 1) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="${fill}"${alpha < 1 ? ` opacity="${alpha}"` : ""}/>`),
      box: (x, y, w, h, stroke, width = 2) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="none" stroke="${stroke}" stroke-width="${width}"/>`),
      hatch: (x, y, w, h) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="url(#idle)"/>`),
      line: (x1, y1, x2, y2, stroke, width = 1, dashes = []) => parts.push(
        `<line x1="${n(x1)}" y1="${n(y1)}" x2="${n(x2)}" y2="${n(y2)}" stroke="${stroke}" stroke-width="${width}"${dashes.length ? ` stroke-dasharray="${dashes}"` : ""}/>`),
      area: (points, fill) => parts.push(
        `<path d="M${points.map(([x, y]) => `${n(x)} ${n(y)}`).join("L")}Z" fill="${fill}"/>`),
      dot: (x, y, radius, fill) => parts.push(`<circle cx="${n(x)}" cy="${n(y)}" r="${radius}" fill="${fill}"/>`),
      text: (x, y, words, { size = 11, fill = colours.ink, align = "center", bold = false } = {}) => parts.push(
        `<text x="${n(x)}" y="${n(y)}" font-size="${size}" fill="${fill}" text-anchor="${{ center: "middle", left: "start", right: "end" }[align]}"${bold ? ' font-weight="650"' : ""}>${escape(words)}</text>`),
    };
  }

  // -- The picture --

  function measure(view, width, zoom = 1) {
    const names = width < 560 ? 30 : 64;
    const hasHeld = view.rows.some((row) => row.held), hasPlan = view.rows.some((row) => row.plan);
    const strip = hasHeld ? 13 : 0;
    const pitch = BAR + (hasPlan ? THIN + 2 : 0) + strip + (hasHeld ? 8 : 14);
    return {
      names, strip, pitch, hasPlan, zoom, width,
      chart: width - names - 2,
      height: TOP + view.rows.length * pitch + AXIS,
      rowTop: (rank) => TOP + rank * pitch,
    };
  }

  function paint(pen, view, layout, marks, colours, shades, scroll = 0) {
    const { names, chart, pitch, zoom } = layout;
    const scale = (chart * zoom) / (view.span || 1);
    const x = (time) => names + time * scale - scroll;
    const from = scroll / scale, to = (scroll + chart) / scale;
    const bottom = layout.rowTop(view.rows.length);
    view.rows.forEach((row, rank) => {
      const top = layout.rowTop(rank);
      pen.rect(names, top, chart, BAR, colours.track);
      for (const gap of row.gaps) {
        if (gap.s > to || gap.s + gap.l < from) continue;
        const end = marks.t === null ? gap.s + gap.l : Math.min(gap.s + gap.l, marks.t);
        if (end > gap.s) pen.hatch(x(gap.s), top, (end - gap.s) * scale, BAR);
        if (marks.chosen === gap.id) pen.box(x(gap.s) + 1.5, top + 1.5, gap.l * scale - 3, BAR - 3, colours.mark, 3);
        else if (marks.hover === gap.id) pen.box(x(gap.s) + 1, top + 1, gap.l * scale - 2, BAR - 2, colours.quiet, 1.5);
      }
      drawBars(pen, row, top, { x, scale, from, to, marks, colours, shades, view });
      for (const part of row.transfers || [])
        if (part.s <= to && part.s + part.l >= from && (marks.t === null || part.s <= marks.t))
          pen.rect(x(part.s), top, Math.max(part.l * scale, 1.5), BAR, colours.transfer);
      if (row.plan) drawPlan(pen, row.plan, top + BAR + 1, { x, scale, from, to, shades });
      if (row.held) drawHeld(pen, row, top + pitch - 8 - layout.strip, { x, layout, view, colours, marks, rank });
    });
    drawLines(pen, marks, layout, x, colours);
    drawAxis(pen, view, layout, { x, scale, from, to, bottom, colours });
    if (marks.ask) {
      const at = Math.min(x(marks.ask.t) + 4, names + chart - 26), top = layout.rowTop(marks.ask.rank);
      pen.rect(at, top, 26, BAR, colours.paper);
      pen.box(at + 1, top + 1, 24, BAR - 2, colours.mark);
      pen.text(at + 13, top + 18, "?", { size: 14, fill: colours.mark, bold: true });
    }
    if (marks.t !== null) pen.line(x(marks.t), TOP - 4, x(marks.t), bottom, colours.mark, 1.5);
    // Names last: bars that were scrolled out of sight pass beneath.
    pen.rect(0, 0, names, layout.height, colours.paper);
    view.rows.forEach((row, rank) => {
      const top = layout.rowTop(rank);
      if (names < 60) pen.text(names - 6, top + 17, String(rank), { size: 12, align: "right", bold: true });
      else {
        pen.text(0, top + (row.note ? 12 : 17), row.name, { size: 12, align: "left", bold: true });
        if (row.note) pen.text(0, top + 25, row.note, { size: 10.5, align: "left", fill: colours.quiet });
      }
    });
  }

  function drawBars(pen, row, top, { x, scale, from, to, marks, colours, shades, view }) {
    // All numbers or none: a size is chosen for the longest.
    const digits = String(row.bars.reduce((most, bar) => Math.max(most, bar.mb), 0)).length;
    for (const bar of row.bars) {
      if (bar.s > to || bar.s + bar.l < from) continue;
      if (marks.hideFrom && marks.hideFrom(bar)) continue;
      const [fill, ink] = shades[bar.kind][bar.chunk || 0];
      const left = x(bar.s), width = bar.l * scale, inset = width > 4 ? 0.6 : 0;
      const isToCome = marks.t !== null && bar.s >= marks.t;
      const isRunning = marks.t !== null && !isToCome && bar.s + bar.l > marks.t;
      const w = Math.max(width - 2 * inset, 0.6);
      if (isToCome || isRunning) pen.rect(left + inset, top, w, BAR, fill, 0.2);
      if (!isToCome) pen.rect(left + inset, top, isRunning ? Math.max((marks.t - bar.s) * scale - inset, 0.6) : w, BAR, fill);
      const size = width >= 7.5 * digits + 3 ? 11.5 : width >= 5.4 * digits + 1 ? 9 : 0;
      const isDark = marks.t === null || (!isToCome && (!isRunning || (marks.t - bar.s) * scale > width / 2 + 5));
      if (size) pen.text(left + width / 2, top + 17, String(bar.mb), { size, fill: isToCome ? colours.quiet : isDark ? ink : colours.ink, bold: !isToCome });
      if (marks.critical?.has(bar.id)) pen.rect(left + inset, top + BAR - 3, w, 3, colours.mark);
      if (marks.chosen === bar.id) pen.box(left + 1, top - 1, Math.max(width - 2, 2), BAR + 2, colours.mark, 3);
      else if (marks.related?.has(bar.id)) pen.box(left + 1.5, top + 1, Math.max(width - 3, 1.5), BAR - 2, colours.mark, 1.6);
      else if (marks.hover === bar.id) pen.box(left + 1.2, top + 1, Math.max(width - 2.4, 1.5), BAR - 2, colours.ink, 1.6);
    }
  }

  function drawPlan(pen, bars, top, { x, scale, from, to, shades }) {
    for (const bar of bars) {
      if (bar.s > to || bar.s + bar.l < from) continue;
      pen.rect(x(bar.s) + 0.4, top, Math.max(bar.l * scale - 0.8, 0.6), THIN, shades[bar.kind][bar.chunk || 0][0]);
    }
  }

  // How many microbatches' activations the stage holds; above the cap in the colour of trouble.
  function drawHeld(pen, row, top, { x, layout, view, colours, marks, rank }) {
    const { strip } = layout, most = Math.max(view.most, view.cap || 0, 1), base = top + strip;
    const height = (count) => (strip * count) / most;
    const until = marks.t === null ? view.span : marks.t;
    let runs = [], count = 0, since = 0;
    for (const [time, next] of row.held) {
      if (time >= until) break;
      if (time > since) runs.push([since, time, count]);
      [since, count] = [Math.max(time, since), next];
    }
    if (until > since) runs.push([since, until, count]);
    pen.line(x(0), base + 0.5, x(view.span), base + 0.5, colours.rule);
    for (const [start, end, held] of runs) {
      if (!held) continue;
      pen.rect(x(start), base - height(held), x(end) - x(start) + 0.5, height(held), colours.held);
      if (view.cap && held > view.cap)
        pen.rect(x(start), base - height(held), x(end) - x(start), height(held) - height(view.cap), colours.over);
    }
    if (view.cap) pen.line(x(0), base - height(view.cap), x(view.span), base - height(view.cap), colours.over, 1, [3, 2]);
  }

  function drawLines(pen, marks, layout, x, colours) {
    for (const { a, b, isFaint } of marks.lines || []) {
      const down = b.rank > a.rank ? 1 : -1, middle = (rank) => layout.rowTop(rank) + BAR / 2;
      const y1 = middle(a.rank) + (down * BAR) / 2, y2 = middle(b.rank) - (down * BAR) / 2;
      const colour = isFaint ? colours.quiet : colours.mark;
      pen.line(x(a.t), y1, x(b.t), y2, colour, isFaint ? 1 : 1.8);
      pen.dot(x(b.t), y2, isFaint ? 1.8 : 3, colour);
    }
  }

  function drawAxis(pen, view, layout, { x, scale, from, to, bottom, colours }) {
    const y = bottom + 1;
    pen.line(layout.names, y, layout.names + layout.chart, y, colours.rule);
    const least = 58 / scale, power = 10 ** Math.floor(Math.log10(least));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least * 0.999) || power;
    for (let number = Math.max(0, Math.ceil(from / tick)); number * tick <= Math.min(to, view.span); number++) {
      const at = x(number * tick);
      pen.line(at, y, at, y + 4, colours.rule);
      const last = at > layout.width - 14;
      pen.text(last ? layout.width - 2 : at, y + 16, view.words(number * tick), { fill: colours.quiet, align: last ? "right" : number ? "center" : "left" });
    }
  }

  // What is at a point: the bar or gap, or null.
  function hit(view, layout, scroll, px, py) {
    const rank = Math.floor((py - TOP) / layout.pitch);
    const row = view.rows[rank];
    if (!row || px < layout.names || py - layout.rowTop(rank) > BAR + 2) return null;
    const time = ((px - layout.names + scroll) / (layout.chart * layout.zoom)) * view.span;
    return [...row.bars, ...row.gaps].find((cell) => time >= cell.s && time < cell.s + cell.l)?.id ?? null;
  }

  function svgFile(view, marks, colours, shades, title, lines) {
    const width = 1000, layout = measure(view, width - 48), pen = svgPainter(colours);
    paint(pen, view, layout, marks, colours, shades);
    const height = layout.height + 76 + 20 * lines.length;
    const foot = svgPainter(colours);
    foot.text(24, 34, title, { size: 17, align: "left", bold: true });
    lines.forEach((line, number) => foot.text(24, layout.height + 76 + 20 * number, line, { size: 12, align: "left", fill: colours.quiet }));
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" style="font-variant-numeric: tabular-nums" role="img">` +
      `<title>${title.replace(/[&<>]/g, "")}</title><defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="${colours.hatch}" stroke-width="2"/></pattern></defs>` +
      `<rect width="${width}" height="${height}" fill="${colours.paper}"/>${foot.parts.join("")}<g transform="translate(24 50)">${pen.parts.join("")}</g></svg>\n`;
  }

  MM.draw = { readColours, canvasPainter, measure, paint, hit, svgFile };
})();
