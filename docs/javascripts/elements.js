"use strict";
// Small parts that all widgets share: elements, words of numbers, icons, a clock that runs, files and links.

(() => {
  const MM = (globalThis.MM ||= {});

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

  // -- Words --

  const round = (value) => String(Number(Number(value).toPrecision(5)));
  MM.words = {
    round,
    number: (value) => (Math.abs(value) >= 1000 ? String(Math.round(value)) : round(Math.round(value * 1000) / 1000)),
    // A length of time in a plan; a run's are in milliseconds.
    units: (value) => MM.say("time.units", { n: value, time: MM.words.number(value) }),
    percent: (value) => `${(100 * value).toFixed(1)} %`,
    minus: (text) => text.replaceAll(" - ", " − "),
    phase: (phase) => (phase ? MM.say(`phase.${phase}`) : ""),
  };

  // A sentence with an element in it: what stands in {braces} of the string is put there.
  MM.sentence = function sentence(name, parts) {
    const text = MM.say(name, Object.fromEntries(Object.entries(parts).filter(([, part]) => !(part instanceof Node))));
    return text.split(/(\{\w+\})/).map((piece) => parts[piece.slice(1, -1)] instanceof Node && piece[0] === "{" ? parts[piece.slice(1, -1)] : piece);
  };

  // -- Icons and buttons --

  MM.icon = function icon(path) {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(drawn.namespaceURI, "path");
    drawn.setAttribute("viewBox", "0 0 16 16");
    drawn.setAttribute("aria-hidden", "true");
    line.setAttribute("d", path);
    drawn.append(line);
    return drawn;
  };

  MM.iconButton = (path, label, act) => make("button", { type: "button", class: "mmp-icon", "aria-label": label, title: label, onclick: act }, MM.icon(path));
  MM.field = (label, control, letter = null) => make("label", { class: "mmp-field" }, make("span", {}, label, letter ? make("var", {}, ` ${letter}`) : null), control);

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

  const SHOWN = 6; // links of a causal chain that are shown at once

  // A causal chain under its heading: items, the root first; many in the middle are folded.
  MM.causes = function causes(heading, items) {
    const hidden = items.slice(1, -(SHOWN - 1)), list = (some) => make("ol", { class: "mmp-causes" }, ...some);
    const shown = hidden.length < 2 ? [list(items)] : [list([items[0]]), make("details", {}, make("summary", {}, MM.say("chain.between", { n: hidden.length })), list(hidden)), list(items.slice(-(SHOWN - 1)))];
    return [make("h4", { "aria-level": 3 }, heading), ...shown];
  };

  // The line of source that a chain ends in, with the function that it is in.
  MM.sourceLine = function sourceLine(frames, root) {
    const [, , text] = frames.findLast(([, , line]) => line) ?? [];
    const [name, url] = frames.findLast(([, , line]) => line) ?? frames.at(-1) ?? [];
    if (!name) return null;
    const shown = name.split(".").slice(-2).join(".").replace("<locals>.", "");
    return make("p", { class: "mmp-sourceline" }, url ? make("a", { href: root + url }, MM.code(shown)) : MM.code(shown), text ? make("code", { class: "mmp-line" }, text) : null);
  };

  const PATTERNS = { "=": "mmp-lines", "~": "mmp-waves", "+": "mmp-dots" };
  // The entry of a legend for a kind of work: its colour and its pattern.
  MM.kindEntry = ([fill, ink, pattern], words) => [`background-color:${fill};color:${ink}`, PATTERNS[pattern] ?? null, words];

  // Entries of a legend: [style, class, words].
  MM.legend = (list, entries) => list.replaceChildren(...entries.map(([style, css, words]) => make("li", {}, make("i", { style: style || null, class: css }), words)));

  MM.figures = (list, entries) => list.replaceChildren(...entries.map(([label, value, remark, isBad]) => make("div", { class: isBad ? "mmp-bad" : null },
    make("dt", {}, label), make("dd", { class: "mmp-value" }, value), make("dd", { class: "mmp-remark" }, remark))));

  MM.tableOf = (caption, heads, rows) => make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((words) => make("th", { scope: "col" }, words)))),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))));

  // -- A clock that runs --

  // play(), pause(), `tick(time)`; jumps from mark to mark where motion is unwanted.
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

  // Where a microbatch is followed, Play follows it on.
  MM.playFollows = function playFollows(widget) {
    const play = widget.clock.play.bind(widget.clock);
    widget.clock.play = (now) => (widget.following ? widget.following.toggle() : play(now));
  };

  MM.transport = function transport({ clock, seek, step }) {
    const play = make("button", { type: "button", class: "mmp-play", onclick: () => clock.toggle(bar.now()) });
    const scrub = make("input", { type: "range", min: 0, max: 1000, value: 1000, class: "mmp-scrub", "aria-label": MM.say("transport.time"),
      oninput: () => { clock.pause(); seek((scrub.value / 1000) * clock.span()); } });
    const readout = make("output", { class: "mmp-now" });
    const speed = make("select", { "aria-label": MM.say("transport.speed"), onchange: () => (clock.speed = Number(speed.value)) },
      ...[0.25, 0.5, 1, 2, 4].map((value) => make("option", { value, selected: value === 1 }, `${value}×`)));
    const button = (icon, label, direction) => MM.iconButton(icon, MM.say(label), () => { clock.pause(); step(direction); });
    const bar = {
      now: () => null,
      element: make("div", { class: "mmp-transport", role: "group", "aria-label": MM.say("transport.name") },
        play, button("M2 2h2v12H2zM14 2v12L5 8z", "transport.start", -Infinity), button("M12 2v12L4 8z", "transport.back", -1),
        button("M4 2v12l8-6z", "transport.on", 1), button("M12 2h2v12h-2zM2 2v12l9-6z", "transport.end", Infinity), scrub, readout, speed),
      show(time, words) {
        scrub.value = Math.round((1000 * (time ?? clock.span())) / (clock.span() || 1));
        scrub.setAttribute("aria-valuetext", words);
        readout.textContent = words;
      },
      running(is) {
        play.textContent = MM.say(is ? "transport.pause" : "transport.play");
        play.setAttribute("aria-pressed", String(is));
      },
    };
    clock.changed = bar.running;
    bar.running(false);
    return bar;
  };

  // -- A link to what is shown --

  // Where the browser gives no clipboard, as on pages opened from a folder, the link is shown to be copied by hand.
  MM.copyLink = function copyLink(address) {
    const said = make("span", { class: "mmp-copied", role: "status" });
    const button = make("button", { type: "button", onclick: async () => {
      const link = address();
      try {
        await navigator.clipboard.writeText(link);
        said.replaceChildren(MM.say("link.copied"));
        setTimeout(() => said.replaceChildren(), 3000);
      } catch {
        const input = make("input", { class: "mmp-link-text", readonly: true, value: link, "aria-label": MM.say("link.address"), onfocus: () => input.select() });
        said.replaceChildren(input);
        input.focus();
      }
    } }, MM.say("link.copy"));
    return make("span", { class: "mmp-copy" }, button, said);
  };
})();
