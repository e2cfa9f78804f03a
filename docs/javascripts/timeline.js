"use strict";
// The timeline as an element: scroll, zoom, pointer and keys around the picture of `draw.js`. Used by
// the schedule player and the replay.

(() => {
  const MM = (globalThis.MM ||= {});

  // -- Elements, as an HTML-like call --

  MM.make = function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "value") node.value = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
  const make = MM.make;

  MM.download = function download(name, text, type) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  MM.isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  const round = (value) => String(Number(Number(value).toPrecision(5)));
  MM.words = {
    round,
    number: (value) => (Math.abs(value) >= 1000 ? String(Math.round(value)) : round(Math.round(value * 1000) / 1000)),
  };

  let number = 0;

  // `options`: label, describe(id) -> {title, lines}, choose(id or null), keys: {key: function}
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
      this.box = make("div", {
        class: "mmp-timeline", role: "application", tabindex: "0", "aria-label": options.label,
        "aria-describedby": help, onkeydown: (event) => this.key(event),
      }, this.scroller, this.tip);
      this.help = make("p", { class: "mmp-help", id: help },
        ...keyWords([["←", "→"], " along a stage, ", ["↑", "↓"], " between stages, ", ["Space"], " play, ",
          ["+", "−", "0"], " zoom, ", ["Esc"], " none"]));
      this.element = make("div", {}, this.box, this.live);
      this.listen();
    }

    listen() {
      const { canvas } = this;
      canvas.addEventListener("pointermove", (event) => this.point(event));
      canvas.addEventListener("pointerleave", () => this.point(null));
      canvas.addEventListener("click", (event) => {
        const id = this.at(event);
        this.choose(id === this.marks.chosen ? null : id);
      });
      this.scroller.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoomTo(this.zoom * Math.exp(-event.deltaY / 300), event.clientX - canvas.getBoundingClientRect().left);
      }, { passive: false });
      new ResizeObserver(() => this.draw()).observe(this.box);
      const recolour = () => { this.colours = null; this.options.recolour?.(); this.draw(); };
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
      new MutationObserver(recolour).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
    }

    // -- Drawing --

    set(view, shades, isDrawn = true) {
      this.view = view;
      this.shades = shades;
      this.rows = view.rows.map((row) => [...row.bars, ...row.gaps].sort((a, b) => a.s - b.s));
      if (isDrawn) this.draw();
    }

    draw() {
      const width = this.box.clientWidth;
      if (!this.view || !width) return;
      this.colours ||= MM.draw.readColours(this.box);
      const layout = (this.layout = MM.draw.measure(this.view, width, this.zoom));
      const ratio = Math.min(devicePixelRatio || 1, 2), { canvas } = this;
      const [w, h] = [Math.round(width * ratio), Math.round(layout.height * ratio)];
      if (canvas.width !== w || canvas.height !== h) {
        canvas.width = w;
        canvas.height = h;
        canvas.style.width = `${width}px`;
        canvas.style.height = `${layout.height}px`;
      }
      this.spacer.style.width = `${layout.names + layout.chart * this.zoom + 2}px`;
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, layout.height);
      MM.draw.paint(MM.draw.canvasPainter(context, this.colours), this.view, layout, this.marks, this.colours, this.shades, this.scroller.scrollLeft);
    }

    mark(marks) {
      Object.assign(this.marks, marks);
      this.draw();
    }

    zoomTo(zoom, at = this.layout.names + this.layout.chart / 2) {
      const { scroller, layout } = this, before = at - layout.names;
      const place = (scroller.scrollLeft + before) / (layout.chart * this.zoom);
      this.zoom = Math.min(40, Math.max(1, zoom));
      this.draw();
      scroller.scrollLeft = place * layout.chart * this.zoom - before;
      this.draw();
    }

    reveal(start, end) {
      const { scroller, layout } = this, scale = (layout.chart * this.zoom) / this.view.span;
      if (start * scale < scroller.scrollLeft) scroller.scrollLeft = start * scale - 20;
      else if (end * scale > scroller.scrollLeft + layout.chart) scroller.scrollLeft = end * scale - layout.chart + 20;
    }

    // -- Pointer --

    at(event) {
      const box = this.canvas.getBoundingClientRect();
      const id = MM.draw.hit(this.view, this.layout, this.scroller.scrollLeft, event.clientX - box.left, event.clientY - box.top);
      const cell = id && this.cell(id);
      return cell && this.marks.hideFrom?.(cell) ? null : id;
    }

    cell(id) {
      return this.rows[Number(id.split(":")[0])]?.find((cell) => cell.id === id);
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
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 };
      if (event.key in zooms) this.zoomTo(this.zoom * zooms[event.key]);
      else if (event.key === "0") this.zoomTo(1);
      else if (event.key === "Escape" && this.marks.chosen) this.choose(null);
      else if (this.move(event.key)) this.tip.hidden = true;
      else if (this.options.keys?.[event.key]) this.options.keys[event.key]();
      else return;
      event.preventDefault();
      event.stopPropagation(); // the site has keys of its own
    }

    move(key) {
      const isVertical = key === "ArrowUp" || key === "ArrowDown";
      if (!isVertical && !["ArrowLeft", "ArrowRight", "Home", "End"].includes(key)) return false;
      const chosen = this.marks.chosen && this.cell(this.marks.chosen);
      const shown = this.rows.map((row) => row.filter((cell) => !this.marks.hideFrom?.(cell)));
      if (!chosen) {
        const first = shown.flat()[0];
        if (first) this.choose(first.id);
        return true;
      }
      const rank = Number(chosen.id.split(":")[0]);
      const row = shown[rank], place = row.indexOf(chosen);
      if (isVertical) {
        const other = shown[rank + (key === "ArrowUp" ? -1 : 1)], middle = chosen.s + chosen.l / 2;
        const distance = (cell) => Math.max(cell.s - middle, middle - cell.s - cell.l, 0);
        if (other?.length) this.choose(other.reduce((best, cell) => (distance(cell) < distance(best) ? cell : best)).id);
        return true;
      }
      const next = { ArrowLeft: Math.max(place - 1, 0), ArrowRight: Math.min(place + 1, row.length - 1), Home: 0, End: row.length - 1 }[key];
      this.choose(row[next].id);
      return true;
    }
  };

  function keyWords(parts) {
    return parts.flatMap((part) => (typeof part === "string" ? [part] : part.flatMap((key) => [make("kbd", {}, key), " "])));
  }

  // -- Parts that player and replay share --

  // A clock that runs: play(), pause(), `tick(time)`; jumps from mark to mark where motion is unwanted.
  MM.Clock = class Clock {
    constructor({ span, next, tick, changed }) {
      Object.assign(this, { span, next, tick, changed, speed: 1, seconds: 14, running: false });
    }

    toggle(now) {
      if (this.running) this.pause();
      else this.play(now);
    }

    play(now) {
      this.time = now === null || now >= this.span() ? 0 : now;
      this.running = true;
      this.changed(true);
      this.tick(this.time);
      let last = performance.now();
      const calm = MM.isCalm();
      const frame = (stamp) => {
        if (!this.running) return;
        const passed = (stamp - last) / 1000;
        if (!calm || passed > 0.7 / this.speed) {
          this.time = calm ? this.next(this.time) : this.time + (passed * this.speed * this.span()) / this.seconds;
          last = stamp;
          if (this.time >= this.span()) {
            this.tick(this.span());
            return this.pause();
          }
          this.tick(this.time);
        }
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    }

    pause() {
      this.running = false;
      this.changed(false);
    }
  };

  MM.transport = function transport({ clock, seek, step, speedLabel = "Speed" }) {
    const play = make("button", { type: "button", class: "mmp-play", onclick: () => clock.toggle(bar.now()) });
    const scrub = make("input", { type: "range", min: 0, max: 1000, value: 1000, class: "mmp-scrub", "aria-label": "Time",
      oninput: () => { clock.pause(); seek((scrub.value / 1000) * clock.span()); } });
    const readout = make("output", { class: "mmp-now" });
    const speed = make("select", { "aria-label": speedLabel, onchange: () => (clock.speed = Number(speed.value)) },
      ...[0.25, 0.5, 1, 2, 4].map((value) => make("option", { value, selected: value === 1 }, `${value}×`)));
    const button = (icon, label, direction) => make("button", { type: "button", "aria-label": label, title: label,
      onclick: () => { clock.pause(); step(direction); } }, drawIcon(icon));
    const bar = {
      now: () => null,
      element: make("div", { class: "mmp-transport", role: "group", "aria-label": "Playback" },
        play, button("M2 2h2v12H2zM14 2v12L5 8z", "To the start", -Infinity), button("M12 2v12L4 8z", "One action back", -1), button("M4 2v12l8-6z", "One action on", 1), button("M12 2h2v12h-2zM2 2v12l9-6z", "To the end", Infinity), scrub, readout, speed),
      show(time, words) {
        scrub.value = Math.round((1000 * (time ?? clock.span())) / (clock.span() || 1));
        scrub.setAttribute("aria-valuetext", words);
        readout.textContent = words;
      },
      running(is) {
        play.textContent = is ? "Pause" : "Play";
        play.setAttribute("aria-pressed", String(is));
      },
    };
    clock.changed = bar.running;
    bar.running(false);
    return bar;
  };

  function drawIcon(path) {
    const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(icon.namespaceURI, "path");
    icon.setAttribute("viewBox", "0 0 16 16");
    icon.setAttribute("aria-hidden", "true");
    line.setAttribute("d", path);
    icon.append(line);
    return icon;
  }

  // A name that may break after an underscore or a dot.
  MM.code = (name) => make("code", {}, ...name.split(/(?<=[_.])/).flatMap((part) => [part, make("wbr")]));

  // Frames of a call chain, outermost first: [name, url, text of the line], as links.
  MM.chain = function chain(frames, root, endsHere = true) {
    return make("ol", { class: "mmp-chain" }, ...frames.map(([name, url, text], place) => {
      const shown = name.split(".").slice(-2).join(".").replace("<locals>.", "");
      const isHere = endsHere && place === frames.length - 1;
      return make("li", { class: isHere ? "mmp-here" : null },
        url ? make("a", { href: root + url }, MM.code(shown)) : MM.code(shown),
        text ? make("code", { class: "mmp-line" }, text) : null);
    }));
  };
})();
