"use strict";
// The timeline as an element: scroll, zoom, pinch, pointer and keys around the picture of `draw.js`. Used by
// the schedule player and the replay.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const MAX_ZOOM = 60, FINGER = 22;
  let number = 0;

  // `options`: label, describe(id) -> {title, lines}, choose(id or null), keys: {key: function}, intercept(key) ->
  // whether the key was used; densityChanged()
  MM.Timeline = class Timeline {
    constructor(options) {
      this.options = options;
      this.zoom = 1;
      this.view = null;
      this.marks = { t: null, chosen: null, hover: null };
      const help = `mmp-help-${++number}`;
      this.canvas = make("canvas", { "aria-hidden": "true" });
      this.spacer = make("div", { class: "mmp-spacer" }, this.canvas);
      this.scroller = make("div", { class: "mmp-scroll", onscroll: () => this.draw() }, this.spacer);
      this.tip = make("div", { class: "mmp-tip", "aria-hidden": "true", hidden: true });
      this.live = make("p", { class: "mmp-hidden", "aria-live": "polite" });
      this.box = make("div", { class: "mmp-timeline", role: "application", tabindex: "0", "aria-label": options.label,
        "aria-describedby": help, onkeydown: (event) => this.key(event) }, this.scroller, this.tip);
      this.map = make("canvas", { class: "mmp-map", "aria-hidden": "true", hidden: true });
      this.zooms = make("div", { class: "mmp-zooms", role: "group", "aria-label": MM.say("zoom.name") },
        MM.iconButton("M2 7h12v2H2z", MM.say("zoom.out"), () => this.zoomTo(this.zoom / 1.6)),
        MM.iconButton("M2 5h2v6H2zM12 5h2v6h-2zM5 7h6v2H5z", MM.say("zoom.all"), () => this.zoomTo(1)),
        MM.iconButton("M7 2h2v5h5v2H9v5H7V9H2V7h5z", MM.say("zoom.in"), () => this.zoomTo(this.zoom * 1.6)));
      this.help = make("p", { class: "mmp-help", id: help }, ...keyWords(MM.say("timeline.help")));
      this.element = make("div", { class: "mmp-timelinebox" }, this.box, this.map, this.live);
      this.listen();
    }

    listen() {
      const { canvas, scroller } = this;
      canvas.addEventListener("pointermove", (event) => this.point(event));
      canvas.addEventListener("pointerleave", () => this.point(null));
      canvas.addEventListener("click", (event) => {
        const id = this.at(event);
        this.choose(id === this.marks.chosen ? null : id);
      });
      scroller.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoomTo(this.zoom * Math.exp(-event.deltaY / 300), event.clientX - this.left());
      }, { passive: false });
      this.listenToFingers();
      const slide = (event) => event.buttons && this.centre(event.offsetX);
      this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); slide(event); });
      this.map.addEventListener("pointermove", slide);
      new ResizeObserver(() => this.draw()).observe(this.box);
      const recolour = () => { this.colours = null; this.options.recolour?.(); this.draw(); };
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
      matchMedia("(pointer: coarse)").addEventListener("change", recolour);
      // On paper: all of it, in the colours of paper. The style sheet makes it as wide as the page.
      matchMedia("print").addEventListener("change", ({ matches }) => {
        if (matches) [this.zoomBefore, this.zoom] = [this.zoom, 1];
        else this.zoom = this.zoomBefore ?? this.zoom;
        recolour();
      });
      new MutationObserver(recolour).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
    }

    // Two fingers zoom about the point between them.
    listenToFingers() {
      let pinch = null;
      const apart = ([a, b]) => Math.max(Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY), 1);
      this.scroller.addEventListener("touchstart", ({ touches }) => {
        pinch = touches.length === 2 ? { distance: apart(touches), zoom: this.zoom } : null;
      }, { passive: true });
      this.scroller.addEventListener("touchmove", (event) => {
        if (!pinch || event.touches.length !== 2) return;
        event.preventDefault();
        const [a, b] = event.touches;
        this.zoomTo((pinch.zoom * apart(event.touches)) / pinch.distance, (a.clientX + b.clientX) / 2 - this.left());
      }, { passive: false });
      this.scroller.addEventListener("touchend", () => (pinch = null), { passive: true });
    }

    left() {
      return this.canvas.getBoundingClientRect().left;
    }

    // -- Drawing --

    set(view, shades, isDrawn = true) {
      this.view = view;
      this.shades = shades;
      this.cells = null;
      if (isDrawn) this.draw();
    }

    // Cells by id, and per lane in order of time; made when first asked for.
    index() {
      if (this.cells) return this.cells;
      const byId = new Map(), rows = [];
      this.view.tracks.forEach((track, number) => track.lanes.forEach((lane, place) => {
        if (lane.kind === "ghost") return;
        const cells = [...lane.bars, ...(lane.gaps ?? [])].sort((a, b) => a.s - b.s);
        for (const cell of cells) byId.set(cell.id, { cell, track: number, lane: place, row: rows.length });
        rows.push(cells);
      }));
      return (this.cells = { byId, rows });
    }

    cell(id) {
      return this.index().byId.get(id)?.cell;
    }

    rowOf(id) {
      return this.index().byId.get(id)?.row;
    }

    get isCoarse() {
      return matchMedia("(pointer: coarse)").matches;
    }

    draw() {
      const width = this.box.clientWidth;
      if (!this.view || !width) return;
      this.colours ||= MM.painters.readColours(this.box);
      const layout = (this.layout = MM.draw.measure(this.view, width, this.zoom, this.isCoarse));
      const context = this.fit(this.canvas, width, layout.height);
      this.spacer.style.width = `${layout.names + layout.chart * this.zoom + 2}px`;
      MM.draw.paint(MM.painters.canvasPainter(context, this.colours), this.view, layout, this.marks, this.colours, this.shades, this.scroller.scrollLeft);
      this.drawMap(width);
      if (layout.isDense === this.wasDense) return;
      this.wasDense = layout.isDense;
      this.options.densityChanged?.(layout.isDense);
    }

    fit(canvas, width, height) {
      const ratio = Math.min(devicePixelRatio || 1, 2), [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      return context;
    }

    drawMap(width) {
      this.map.hidden = this.zoom <= 1.001;
      if (this.map.hidden) return;
      const { layout, scroller } = this, from = scroller.scrollLeft / layout.scale;
      const height = this.isCoarse ? 44 : 30, pen = MM.painters.canvasPainter(this.fit(this.map, width, height), this.colours);
      MM.draw.minimap(pen, this.view, width, height, this.colours, this.shades, { from, to: from + layout.chart / layout.scale, names: layout.names });
    }

    // Puts the time at this place of the minimap into the middle.
    centre(x) {
      const { layout, scroller } = this;
      scroller.scrollLeft = ((x - layout.names) / layout.chart) * layout.chart * this.zoom - layout.chart / 2;
    }

    mark(marks) {
      Object.assign(this.marks, marks);
      this.draw();
    }

    zoomTo(zoom, at = this.layout.names + this.layout.chart / 2) {
      const { scroller, layout } = this, before = at - layout.names;
      const place = (scroller.scrollLeft + before) / (layout.chart * this.zoom);
      this.zoom = Math.min(MAX_ZOOM, Math.max(1, zoom));
      this.draw();
      scroller.scrollLeft = place * layout.chart * this.zoom - before;
      this.draw();
    }

    reveal(start, end) {
      const { scroller, layout } = this;
      if (!layout) return;
      if (start * layout.scale < scroller.scrollLeft) scroller.scrollLeft = start * layout.scale - 20;
      else if (end * layout.scale > scroller.scrollLeft + layout.chart) scroller.scrollLeft = end * layout.scale - layout.chart + 20;
    }

    // Where a cell is on the screen.
    boxOf(id) {
      const found = this.index().byId.get(id);
      if (!found || !this.layout) return null;
      const { layout } = this, box = this.canvas.getBoundingClientRect(), { y, height } = layout.tracks[found.track].lanes[found.lane];
      const left = box.left + layout.names + found.cell.s * layout.scale - this.scroller.scrollLeft;
      return new DOMRect(left, box.top + y, Math.max(found.cell.l * layout.scale, 2), height);
    }

    // -- Pointer --

    at(event) {
      const box = this.canvas.getBoundingClientRect(), reach = event.pointerType === "touch" || this.isCoarse ? FINGER : 3;
      const id = MM.draw.hit(this.view, this.layout, this.scroller.scrollLeft, event.clientX - box.left, event.clientY - box.top, reach);
      const cell = id && this.cell(id);
      return cell && this.marks.hideFrom?.(cell) ? null : id;
    }

    point(event) {
      const id = event && event.pointerType !== "touch" ? this.at(event) : null;
      if (id !== this.marks.hover) this.mark({ hover: id });
      this.canvas.style.cursor = id ? "pointer" : "";
      this.tip.hidden = !id;
      if (!id) return;
      const { title, lines } = this.options.describe(id);
      this.tip.replaceChildren(make("b", {}, title), ...lines.map((line) => make("div", {}, line)));
      const box = this.box.getBoundingClientRect();
      const x = event.clientX - box.left + 14, y = event.clientY - box.top + 18;
      this.tip.style.left = `${Math.max(0, Math.min(x, box.width - this.tip.offsetWidth - 4))}px`;
      this.tip.style.top = `${y}px`;
    }

    choose(id, isQuiet = false) {
      this.mark({ chosen: id });
      if (id) {
        const cell = this.cell(id);
        if (cell) this.reveal(cell.s, cell.s + cell.l);
        const { title, lines } = this.options.describe(id);
        if (!isQuiet) this.live.textContent = [title, ...lines].join(". ");
      }
      this.options.choose(id);
    }

    // -- Keys --

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.box) return;
      const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 };
      if (event.key in zooms) this.zoomTo(this.zoom * zooms[event.key]);
      else if (event.key === "0") this.zoomTo(1);
      else if (event.key === "Escape" && this.marks.chosen) this.choose(null);
      else if (this.options.intercept?.(event.key) || this.move(event.key)) this.tip.hidden = true;
      else if (this.options.keys?.[event.key]) this.options.keys[event.key]();
      else return;
      event.preventDefault();
      event.stopPropagation(); // the site has keys of its own
    }

    move(key) {
      const isVertical = key === "ArrowUp" || key === "ArrowDown";
      if (!isVertical && !["ArrowLeft", "ArrowRight", "Home", "End"].includes(key)) return false;
      const { rows } = this.index(), shown = rows.map((row) => row.filter((cell) => !this.marks.hideFrom?.(cell)));
      const number = this.marks.chosen ? this.rowOf(this.marks.chosen) : undefined;
      const row = shown[number] ?? [], chosen = this.marks.chosen && this.cell(this.marks.chosen);
      const place = row.indexOf(chosen);
      if (number === undefined || place < 0) {
        const first = shown.flat()[0];
        if (first) this.choose(first.id);
        return true;
      }
      if (isVertical) {
        const other = shown[number + (key === "ArrowUp" ? -1 : 1)], middle = chosen.s + chosen.l / 2;
        const distance = (cell) => Math.max(cell.s - middle, middle - cell.s - cell.l, 0);
        if (other?.length) this.choose(other.reduce((best, cell) => (distance(cell) < distance(best) ? cell : best)).id);
        return true;
      }
      const next = { ArrowLeft: Math.max(place - 1, 0), ArrowRight: Math.min(place + 1, row.length - 1), Home: 0, End: row.length - 1 }[key];
      this.choose(row[next].id);
      return true;
    }
  };

  // Keys of the help text stand in [brackets].
  function keyWords(text) {
    return text.split(/(\[[^\]]+\])/).map((piece) => (piece[0] === "[" ? make("kbd", {}, piece.slice(1, -1)) : piece));
  }
})();
