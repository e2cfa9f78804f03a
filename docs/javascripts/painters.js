"use strict";
// Two painters with the same words: one paints on a canvas, for the page; one writes SVG, for a file.

(() => {
  const MM = (globalThis.MM ||= {});

  // -- Colours: the site's own, read once per colour scheme --

  // Also those of paper, for files.
  const FALLBACK = {
    ink: "#1c2733", quiet: "#57636f", paper: "#ffffff", track: "#edf0f3", hatch: "#c0c9d1", rule: "#cfd6dd",
    mark: "#c2185b", transfer: "#9b4d86", held: "#6d7f90", owed: "#8a5a9e", over: "#b3261e", outer: "#10151b", inner: "#ffffff",
  };

  function readColours(element) {
    const style = getComputedStyle(element);
    const colours = {};
    for (const [name, value] of Object.entries(FALLBACK)) colours[name] = style.getPropertyValue(`--mmp-${name}`).trim() || value;
    return colours;
  }

  function canvasPainter(context, colours) {
    const font = (size, bold) => `${bold ? 650 : 400} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
    let hatching = null;
    const stroke = (points, colour, width, dashes) => {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.setLineDash(dashes);
      context.beginPath();
      points.forEach(([x, y], number) => (number ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.stroke();
      context.setLineDash([]);
    };
    return {
      rect(x, y, w, h, fill, alpha = 1) {
        context.globalAlpha = alpha;
        context.fillStyle = fill;
        context.fillRect(x, y, w, h);
        context.globalAlpha = 1;
      },
      box(x, y, w, h, colour, width = 2, dashes = []) {
        context.strokeStyle = colour;
        context.lineWidth = width;
        context.setLineDash(dashes);
        context.strokeRect(x, y, w, h);
        context.setLineDash([]);
      },
      hatch(x, y, w, h) {
        hatching ||= hatchPattern(context, colours);
        context.fillStyle = hatching;
        context.fillRect(x, y, w, h);
      },
      line: (x1, y1, x2, y2, colour, width = 1, dashes = []) => stroke([[x1, y1], [x2, y2]], colour, width, dashes),
      path: (points, colour, width = 1, dashes = []) => stroke(points, colour, width, dashes),
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

  const escape = (words) => String(words).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

  function svgPainter(colours) {
    const parts = [], n = (value) => Number(value.toFixed(2));
    const dashed = (dashes) => (dashes.length ? ` stroke-dasharray="${dashes}"` : "");
    const pen = {
      parts,
      rect: (x, y, w, h, fill, alpha = 1) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="${fill}"${alpha < 1 ? ` opacity="${alpha}"` : ""}/>`),
      box: (x, y, w, h, stroke, width = 2, dashes = []) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="none" stroke="${stroke}" stroke-width="${width}"${dashed(dashes)}/>`),
      hatch: (x, y, w, h) => parts.push(
        `<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(w, 0))}" height="${n(h)}" fill="url(#idle)"/>`),
      line: (x1, y1, x2, y2, stroke, width = 1, dashes = []) => parts.push(
        `<line x1="${n(x1)}" y1="${n(y1)}" x2="${n(x2)}" y2="${n(y2)}" stroke="${stroke}" stroke-width="${width}"${dashed(dashes)}/>`),
      path: (points, stroke, width = 1, dashes = []) => parts.push(
        `<path d="M${points.map(([x, y]) => `${n(x)} ${n(y)}`).join("L")}" fill="none" stroke="${stroke}" stroke-width="${width}"${dashed(dashes)}/>`),
      dot: (x, y, radius, fill) => parts.push(`<circle cx="${n(x)}" cy="${n(y)}" r="${radius}" fill="${fill}"/>`),
      text: (x, y, words, { size = 11, fill = colours.ink, align = "center", bold = false } = {}) => parts.push(
        `<text x="${n(x)}" y="${n(y)}" font-size="${size}" fill="${fill}" text-anchor="${{ center: "middle", left: "start", right: "end" }[align]}"${bold ? ' font-weight="650"' : ""}>${escape(words)}</text>`),
    };
    return pen;
  }

  // A file of its own: title, picture, legend, figures, and where it comes from.
  // `legend`: [{fill or "idle", words}]; `lines`: sentences below.
  function svgFile({ view, marks, colours, shades, title, legend, lines }) {
    const width = 1000, layout = MM.draw.measure(view, width - 48), pen = svgPainter(colours), foot = svgPainter(colours);
    MM.draw.paint(pen, view, layout, marks, colours, shades);
    foot.text(24, 34, title, { size: 17, align: "left", bold: true });
    let x = 24, y = layout.height + 74;
    for (const { fill, words } of legend) {
      const length = 34 + [...words].reduce((sum, sign) => sum + (sign > "\u2e7f" ? 13 : 7), 0); // a Chinese sign is wide
      if (x + length > width - 24) { x = 24; y += 22; }
      if (fill === "idle") { foot.rect(x, y - 10, 18, 12, colours.track); foot.hatch(x, y - 10, 18, 12); }
      else foot.rect(x, y - 10, 18, 12, fill);
      foot.text(x + 24, y, words, { size: 12, align: "left", fill: colours.quiet });
      x += length;
    }
    for (const line of lines) for (const piece of line.match(/.{1,130}(\s|$)|\S{1,130}/g) ?? []) foot.text(24, (y += 20), piece, { size: 12, align: "left", fill: colours.quiet });
    const height = y + 20;
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" style="font-variant-numeric: tabular-nums" role="img">` +
      `<title>${escape(title)}</title><defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="${colours.hatch}" stroke-width="2"/></pattern></defs>` +
      `<rect width="${width}" height="${height}" fill="${colours.paper}"/>${foot.parts.join("")}<g transform="translate(24 50)">${pen.parts.join("")}</g></svg>\n`;
  }

  MM.painters = { PAPER: FALLBACK, readColours, canvasPainter, svgPainter, svgFile };
})();
