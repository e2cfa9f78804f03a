"use strict";
// One recorded step, unrolled into the code that it ran. `unrolled_page.py` says what the data holds.
//
// All calls of a rank are one tree. A call is open, and then shows its lines and all that they call; or it is
// not, and then shows the links of the chain within it: who calls whom. Lines of calls that are not open are
// in the page too, for the browser's own search.

(() => {
  const MM = (globalThis.MM ||= {});
  const DEPTHS = [0, 1, 2, 3, 4, 5, 6, 8, 10, Infinity];

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element[name] = value;
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // {name} is filled in; of plural forms the one of `n`.
  function sayer(strings) {
    const plural = new Intl.PluralRules(document.documentElement.lang || "en");
    return (name, values = {}) => {
      const text = strings[name], form = typeof text === "string" ? text : text[plural.select(values.n)] ?? text.other;
      return form.replace(/\{(\w+)\}/g, (whole, key) => (key in values ? String(values[key]) : whole));
    };
  }

  // A sentence with `code` in it, as elements.
  const prose = (text) => text.split("`").map((part, at) => (at % 2 ? make("code", {}, part) : part));

  const numbered = (number) => number.toLocaleString("en");

  const isSeen = (element) => (element.checkVisibility ? element.checkVisibility({ contentVisibilityAuto: true }) && element.getClientRects().length > 0 : element.offsetParent !== null);

  const groupBy = (list, key) => list.reduce((groups, one) => groups.set(key(one), [...(groups.get(key(one)) ?? []), one]), new Map());

  // "0-2, 7" -> whether a number is among these.
  const among = (words, number) => words.split(", ").some((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return first <= number && number <= last;
  });

  // The calls of one rank: what is open, as elements.
  class RankTree {
    constructor(page, rank) {
      Object.assign(this, { page, rank, data: page.data, say: page.say });
      this.nodes = rank.nodes.map(([view, caller, line, calls, units, notes, isLink, isNew, loops], number) =>
        ({ number, view: this.data.views[view], caller, line, calls, units: this.data.words[units], notes: this.data.words[notes], isLink: Boolean(isLink), isFirst: isNew === 1, isNew: Boolean(isNew), loops: this.data.words[loops], children: [], messages: [], parts: [], isOpen: false }));
      rank.messages.forEach((message, number) => this.nodes[message[0]].messages.push({ number, message }));
      this.firsts = new Map();
      for (const node of this.nodes) {
        node.level = node.caller < 0 ? 0 : this.nodes[node.caller].level + 1;
        if (node.caller >= 0) this.nodes[node.caller].children.push(node);
        if (!this.firsts.has(node.view[0])) this.firsts.set(node.view[0], node);
      }
      // Callers come before what they call, so from the last one on.
      for (const node of this.nodes.toReversed()) node.hasLinks = node.children.some((child) => child.isLink || child.hasLinks);
      for (const node of this.nodes) this.build(node);
      this.element = make("ol", { class: "u-tree", "aria-label": this.say("unrolled.tree", { rank: rank.rank }) }, this.nodes[0].item);
      for (const node of this.nodes) this.fill(node, node.isFirst);
    }

    id(kind, number) {
      return `rank-${this.rank.rank}-${kind}-${number}`;
    }

    // -- A call's own row --

    build(node) {
      const [, path, line] = this.data.functions[node.view[0]], links = this.page.linksOf(node.view[0]);
      node.button = make("button", { type: "button", class: "u-open", "aria-expanded": "false", onclick: () => this.toggle(node) }, make("code", {}, this.name(node)));
      const place = `${path.split("/").at(-1)}:${line}`;
      node.via = make("span", { class: "u-via" });
      node.said = make("span", { class: "u-words" }, this.words(node, null));
      node.head = make("div", { class: "u-head" }, node.button, node.via, node.said,
        links.source ? make("a", { class: "u-place", href: links.source }, place) : make("span", { class: "u-place" }, place));
      const carried = Map.groupBy ? Map.groupBy(node.messages, (one) => one.message[8]) : groupBy(node.messages, (one) => one.message[8]);
      node.told = make("ul", { class: "u-messages" }, ...[...carried.values()].map((messages) => this.carried(messages)));
      node.body = make("div", { class: "u-body" });
      const kind = node.isLink ? "u-link" : node.hasLinks ? "u-inner" : "u-inner u-bare";
      node.item = make("li", { id: this.id("call", node.number), class: `u-call ${kind}` }, node.head, node.messages.length ? node.told : null, node.body);
    }

    name(node) {
      return this.data.names[node.view[0]];
    }

    // What its calls worked on, and how many there were; of one microbatch, or of all (null).
    words(node, mb) {
      const { say } = this, units = node.messages.length ? [] : node.units.filter(([, which]) => mb === null || among(which, mb));
      const parts = units.map(([chunk, which]) => {
        const shown = mb === null ? which : String(mb), what = say("unrolled.microbatches", { n: /^\d+$/.test(shown) ? 1 : 2, which: shown });
        return this.data.chunks ? say("unrolled.chunk", { chunk, what }) : what;
      });
      // How many of its calls are of one microbatch is not known here.
      const calls = node.calls > 1 && (mb === null || !node.units.length) ? say("unrolled.calls", { n: node.calls }) : "";
      return [parts.join("; "), calls, ...node.notes.slice(0, 2)].filter(Boolean).join(" · ");
    }

    // What one call sent, and what it received.
    carried(messages) {
      const item = make("li", {}, ...messages.flatMap((one, at) => [at ? make("span", { class: "u-and" }, "; ") : null, this.message(one)]));
      item.mbs = messages.map((one) => one.message[3]);
      return item;
    }

    message({ number, message: [, isSent, payload, mb, chunk, peer, peerNumber, size] }) {
      const where = `rank ${peer}`, what = this.data.words[payload], words = { what, mb: this.data.chunks ? this.say("unrolled.of-chunk", { mb, chunk }) : mb, where: "\x00", size: this.data.words[size] };
      const [before, after] = this.say(isSent ? "unrolled.sent" : "unrolled.received", words).split("\x00");
      const link = peerNumber < 0 ? where : make("a", { href: `#rank-${peer}-message-${peerNumber}` }, where);
      return make("span", { class: "u-message", id: this.id("message", number), tabindex: "-1" }, before, link, after);
    }

    // -- What stands below it: its lines, and what they call --

    // `hasCode`: also lines. Of a function that was called before they are made when somebody opens the call.
    fill(node, hasCode) {
      node.hasCode = hasCode;
      node.parts = []; // code, or lists of calls, in the order of lines
      if (hasCode) {
        const byLine = new Map();
        for (const child of node.children) byLine.set(child.line, [...(byLine.get(child.line) ?? []), child]);
        node.parts.push(this.about(node));
        for (const { code, calls } of this.rows(node, byLine)) {
          if (code.length) node.parts.push(this.hideable(make("div", { class: "u-code" }, ...code), node));
          if (calls.length) node.parts.push(calls);
        }
      }
      this.show(node);
    }

    // Runs of lines, each up to the next call.
    *rows(node, byLine) {
      const [number, folds, counts] = node.view, [, , first, , from, to, text] = this.data.functions[number];
      const lines = text.split("\n"), some = new Map(counts), starts = new Map(folds.map((fold) => [fold[0], fold])), left = new Set(byLine.keys());
      const own = (at) => (from && at > to ? at - (to - from + 1) : at), last = lines.length + (from ? to - from + 1 : 0);
      let code = [];
      for (let at = 1; at <= last; at++) {
        const fold = starts.get(at), end = fold ? fold[1] : at;
        const text = fold ? "" : lines[own(at) - 1];
        if (!fold && (text.trim() || (code.length && at < last))) code.push(this.line(first + at - 1, text, some.get(at), node.calls));
        else if (fold && at !== from) code.push(...this.fold(fold, first, lines.slice(own(at) - 1, own(end))));
        const calls = [];
        for (let line = at; line <= end; line++) if (left.delete(line)) calls.push(...byLine.get(line));
        if (calls.length) {
          yield { code, calls };
          code = [];
        }
        at = end;
      }
      yield { code, calls: [...left].flatMap((line) => byLine.get(line)) };
    }

    line(number, text, count, calls) {
      const isComment = text.trimStart().startsWith("#");
      const line = make("span", { class: `u-line${isComment ? " u-comment" : text.trim() ? "" : " u-blank"}`, "data-n": number }, text || " ");
      if (count !== undefined) line.append(make("small", {}, this.say("unrolled.some", { count, calls })));
      return line;
    }

    // A button, and the lines that it shows.
    fold([from, to, words], first, lines) {
      const hidden = make("span", { class: "u-folded", hidden: true }, ...lines.map((text, at) => make("span", { class: "u-line u-not", "data-n": first + from - 1 + at }, text || " ")));
      const indent = " ".repeat(Math.max(0, lines[0].length - lines[0].trimStart().length));
      const button = make("button", { type: "button", class: "u-fold", "aria-expanded": "false", onclick: () => {
        hidden.hidden = !hidden.hidden;
        button.setAttribute("aria-expanded", String(!hidden.hidden));
      } }, this.say("unrolled.fold", { n: to - from + 1, words: this.data.words[words] }));
      return [make("span", { class: "u-line u-foldline" }, indent, button), hidden];
    }

    // What is said of the function where it is open: what it is, and where more is to be read.
    about(node) {
      const [, , , sentence] = this.data.functions[node.view[0]], links = this.page.linksOf(node.view[0]), replay = this.page.replayOf(this.rank, node.number);
      const more = [], aim = (event) => (event.target.href = this.page.replayOf(this.rank, node.number));
      if (!node.isFirst) more.push(make("a", { href: `#${this.id("call", this.firsts.get(node.view[0]).number)}` }, this.say("unrolled.again")));
      if (links.tour) more.push(make("a", { href: links.tour[1] }, this.say("unrolled.tour", { title: links.tour[0] })));
      if (replay) more.push(make("a", { href: replay, onmouseenter: aim, onfocus: aim, onclick: aim }, this.say("unrolled.replay")));
      return this.hideable(make("p", { class: "u-about" }, links.status ? make("strong", { class: "u-status" }, this.say(`unrolled.${links.status}`)) : null, ...(sentence ? [...prose(sentence), ". "] : []), ...more.flatMap((link, at) => (at ? [" · ", link] : [link]))), node);
    }

    // Hidden until it is opened, or found by the browser's search.
    hideable(element, node) {
      element.addEventListener("beforematch", () => {
        this.reveal(node);
        this.open(node);
        this.page.changed();
      });
      return element;
    }

    // -- Opening --

    toggle(node) {
      if (node.isOpen) this.close(node);
      else this.open(node);
      this.page.opened(node);
    }

    open(node) {
      if (!node.hasCode) this.fill(node, true);
      node.isOpen = true;
      this.show(node);
    }

    // Helpers within it have no row of their own any more, so they close too.
    close(node) {
      node.isOpen = false;
      this.show(node);
      for (const child of node.children) if (!child.isLink) this.close(child);
    }

    show(node) {
      node.item.classList.toggle("u-opened", node.isOpen);
      node.button.setAttribute("aria-expanded", String(node.isOpen));
      const codes = node.parts.filter((part) => !Array.isArray(part)), calls = (children) => make("ol", { class: "u-calls" }, ...children.map((child) => child.item));
      for (const code of codes) {
        if (node.isOpen) code.removeAttribute("hidden");
        else code.setAttribute("hidden", "until-found");
      }
      // A helper that leads to no link has a row where its caller is open. What is not displayed would not be found.
      for (const child of node.children.filter((one) => !one.isLink && !one.hasLinks)) {
        if (node.isOpen) child.item.removeAttribute("hidden");
        else child.item.setAttribute("hidden", "until-found");
      }
      // Open, the calls stand between the lines; else in the order in which they were first made.
      if (node.isOpen) node.body.replaceChildren(...node.parts.map((part) => (Array.isArray(part) ? calls(part) : part)));
      else {
        const list = node.children.length ? make("ol", { class: "u-calls" }, ...this.withLoops(node)) : "";
        if (list && !node.hasLinks) list.setAttribute("hidden", "until-found");
        node.body.replaceChildren(...codes, list);
      }
    }

    // The calls in the order in which they were first made, and above those of a loop how it begins.
    *withLoops(node) {
      let loops = [];
      for (const child of node.children) {
        if (child.isLink || child.hasLinks) {
          const before = loops;
          ({ loops } = child);
          for (const [depth, line] of loops.entries()) if (!before.includes(line)) yield make("li", { class: "u-loop", style: `--depth: ${depth}` }, make("code", {}, this.lineOf(node, line)));
        }
        child.item.style.setProperty("--depth", loops.length);
        child.item.classList.toggle("u-looped", loops.length > 0);
        yield child.item;
      }
    }

    // A line of a function's text, without the comment behind it.
    lineOf(node, line) {
      const [, , , , from, to, text] = this.data.functions[node.view[0]];
      return text.split("\n")[(from && line > to ? line - (to - from + 1) : line) - 1].split("  #")[0].trim();
    }

    // Says of the links within it which helpers between them and the next link have no row.
    nameHelpers(node, hidden = []) {
      for (const child of node.children) {
        if (child.isLink) {
          child.via.textContent = hidden.length && !node.isOpen ? this.say("unrolled.via", { names: hidden.map((one) => this.name(one).split(", ")[0]).join(" › ") }) : "";
        } else if (child.hasLinks) this.nameHelpers(child, node.isOpen ? [] : [...hidden, child]);
      }
    }

    // Opens what must be open so that the call has a row.
    reveal(node) {
      if (node.caller < 0) return;
      const caller = this.nodes[node.caller];
      if (!node.isLink && !caller.isOpen) this.open(caller);
      this.reveal(caller);
    }

    openTo(depth) {
      for (const node of this.nodes) {
        node.isOpen = node.isNew && node.level < depth;
        if (node.isOpen && !node.hasCode) this.fill(node, true);
        // An open call needs a row.
        if (node.isOpen && node.caller >= 0 && !node.isLink && !this.nodes[node.caller].isOpen) node.isOpen = false;
        this.show(node);
      }
    }

    // Only what is about a microbatch, and the calls around it; null for all.
    limit(mb) {
      const isAbout = (node) => mb === null || node.units.some(([, which]) => among(which, mb));
      for (const node of this.nodes.toReversed()) {
        node.isWanted = isAbout(node) || node.children.some((child) => child.isWanted);
        node.item.classList.toggle("u-away", !node.isWanted);
        for (const item of node.told.children) item.classList.toggle("u-away", mb !== null && !item.mbs.includes(mb));
        node.said.textContent = this.words(node, mb);
      }
    }

    microbatches() {
      return this.nodes.flatMap((node) => node.units.flatMap(([, which]) => which.split(/[-, ]+/).map(Number))).reduce((most, mb) => Math.max(most, mb), -1) + 1;
    }

    // How many rows and lines are to be seen.
    seen(node = this.nodes[0], hasRow = true) {
      if (node.isWanted === false) return { rows: 0, lines: 0 };
      const sum = { rows: Number(hasRow), lines: node.isOpen ? node.body.querySelectorAll(":scope > .u-code > .u-line:not(.u-foldline, .u-blank)").length : 0 };
      for (const child of node.children) {
        const inside = this.seen(child, child.isLink || node.isOpen);
        sum.rows += inside.rows;
        sum.lines += inside.lines;
      }
      return sum;
    }

    buttons() {
      return [...this.element.querySelectorAll(".u-open")].filter(isSeen);
    }
  }

  class UnrolledPage {
    constructor(root, data) {
      Object.assign(this, { root, data, say: sayer(data.strings ?? MM.strings), trees: new Map(), depth: 0, mb: null });
      this.build();
      this.openRank(data.first ?? data.ranks[0].rank);
      this.readAddress();
      addEventListener("hashchange", () => this.readAddress());
    }

    linksOf(number) {
      return this.data.links?.[number] ?? {};
    }

    // The moment of the microbatch that is chosen, else the first.
    replayOf(rank, number) {
      const ids = rank.replay?.[number];
      return ids ? this.data.replay + (ids[this.mb] ?? Object.values(ids)[0]) : null;
    }

    // -- Controls --

    build() {
      const { say } = this;
      this.ranks = make("select", { onchange: () => this.openRank(Number(this.ranks.value), true) },
        ...this.data.ranks.map(({ rank, place }) => make("option", { value: rank }, place ? `${rank} (${place})` : String(rank))));
      this.depths = make("select", { onchange: () => this.setDepth(Number(this.depths.value)) },
        ...DEPTHS.map((depth) => make("option", { value: depth }, depth === 0 ? say("unrolled.whom") : depth === Infinity ? say("unrolled.every") : say("unrolled.levels", { n: depth }))));
      this.microbatches = make("select", { onchange: () => this.limit(this.microbatches.value === "" ? null : Number(this.microbatches.value)) });
      const field = (name, control) => {
        control.setAttribute("aria-label", say(name)); // a label's own text has the options in it
        return make("label", { class: "u-field" }, make("span", {}, say(name)), control);
      };
      const button = (name, by) => make("button", { type: "button", onclick: () => this.deepen(by) }, say(name));
      this.figures = make("p", { class: "u-figures" });
      this.time = make("p", { class: "u-time", role: "status" });
      this.place = make("div", { class: "u-place-of-tree" });
      addEventListener("keydown", (event) => {
        if (this.root.contains(event.target) || event.target === document.body) this.key(event);
      });
      this.root.replaceChildren(
        make("div", { class: "u-controls", role: "group", "aria-label": say("unrolled.controls") }, field("unrolled.rank", this.ranks), field("unrolled.microbatch", this.microbatches), field("unrolled.depth", this.depths), button("unrolled.deeper", 1), button("unrolled.shallower", -1)),
        this.figures, this.time, make("p", { class: "u-keys" }, say("unrolled.keys")), this.place);
      this.root.dataset.ready = "";
    }

    openRank(rank, isAsked = false) {
      if (!this.trees.has(rank)) this.trees.set(rank, new RankTree(this, this.data.ranks.find((one) => one.rank === rank)));
      this.tree = this.trees.get(rank);
      this.ranks.value = String(rank);
      const { calls, functions, lines } = this.tree.rank;
      this.figures.textContent = this.say("unrolled.figures", { calls: calls.toLocaleString("en"), functions, lines: numbered(lines) });
      this.place.replaceChildren(this.tree.element);
      const options = Array.from({ length: this.tree.microbatches() }, (_, mb) => make("option", { value: mb }, String(mb)));
      this.microbatches.replaceChildren(make("option", { value: "" }, this.say("unrolled.all")), ...options);
      this.microbatches.value = this.mb === null ? "" : String(this.mb);
      this.tree.openTo(this.depth);
      this.tree.limit(this.mb);
      this.changed();
      if (isAsked) this.writeAddress();
    }

    // Deeper: what a reader has opened stays open.
    setDepth(depth) {
      const focused = document.activeElement, call = depth > this.depth ? this.call : null;
      const kept = depth > this.depth ? this.tree.nodes.filter((node) => node.isOpen) : [];
      this.depth = depth;
      this.depths.value = String(depth);
      this.tree.openTo(depth);
      for (const node of kept) {
        this.tree.reveal(node);
        this.tree.open(node);
      }
      if (this.place.contains(focused)) (isSeen(focused) ? focused : this.tree.nodes[0].button).focus({ preventScroll: true });
      this.changed();
      this.writeAddress(call);
    }

    deepen(by) {
      const at = DEPTHS.indexOf(this.depth) + by;
      this.setDepth(DEPTHS[Math.max(0, Math.min(at, DEPTHS.length - 1))]);
    }

    limit(mb) {
      this.mb = mb;
      this.microbatches.value = mb === null ? "" : String(mb);
      this.tree.limit(mb);
      this.changed();
      this.writeAddress();
    }

    opened(node) {
      this.changed();
      this.writeAddress(node.isOpen ? node.number : null);
    }

    changed() {
      const { rows, lines } = this.tree.seen(), minutes = Math.max(1, Math.round((rows + lines) / this.data.rate));
      for (const node of this.tree.nodes) if (node.isLink || node.caller < 0) this.tree.nameHelpers(node);
      this.time.textContent = this.say("unrolled.time", { rows: numbered(rows), lines: numbered(lines), minutes });
    }

    // -- Keys --

    key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select")) return;
      if (event.key === "+" || event.key === "-") {
        this.deepen(event.key === "+" ? 1 : -1);
        event.preventDefault();
        return;
      }
      const item = event.target.closest(".u-call"), node = item && this.tree.nodes[Number(item.id.split("-").at(-1))];
      if (!node || event.target.matches(".u-fold")) return;
      const buttons = this.tree.buttons(), at = buttons.indexOf(node.button);
      const act = {
        ArrowDown: () => buttons[at + 1]?.focus(),
        ArrowUp: () => buttons[at - 1]?.focus(),
        Home: () => buttons[0].focus(),
        End: () => buttons.at(-1).focus(),
        ArrowRight: () => (node.isOpen ? buttons[at + 1]?.focus() : this.tree.toggle(node)),
        ArrowLeft: () => (node.isOpen ? this.tree.toggle(node) : this.callerRow(node)?.focus()),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    callerRow(node) {
      for (let at = node.caller; at >= 0; at = this.tree.nodes[at].caller) {
        const { button } = this.tree.nodes[at];
        if (isSeen(button)) return button;
      }
      return null;
    }

    // -- The address: #rank-1-call-57, #rank-1-message-4, or #rank=1&depth=2&microbatch=3&call=57 --

    readAddress() {
      const place = /^#rank-(\d+)(?:-(call|message)-(\d+))?$/.exec(location.hash);
      if (place) this.go(Number(place[1]), place[2], place[3] === undefined ? null : Number(place[3]));
      else if (location.hash.includes("=")) {
        const words = new URLSearchParams(location.hash.slice(1)), number = (name) => (words.has(name) && /^\d+$/.test(words.get(name)) ? Number(words.get(name)) : null);
        this.depth = words.get("depth") === "all" ? Infinity : DEPTHS.includes(number("depth")) ? number("depth") : this.depth;
        this.depths.value = String(this.depth);
        this.mb = number("microbatch");
        this.go(number("rank") ?? this.tree.rank.rank, "call", number("call"));
      }
    }

    go(rank, kind, number) {
      const hasRank = this.data.ranks.some((one) => one.rank === rank);
      if (hasRank && (this.tree.rank.rank !== rank || kind === undefined || number === null)) this.openRank(rank);
      if (!hasRank || (number !== null && kind === "call" && !(number in this.tree.nodes)) || (number !== null && kind === "message" && !(number in this.tree.rank.messages))) {
        this.time.textContent = this.say("unrolled.no-call", { what: location.hash.slice(1) });
        return;
      }
      if (number === null) return;
      const { tree } = this, isCall = kind === "call", node = tree.nodes[isCall ? number : tree.rank.messages[number][0]];
      if (!node.isWanted) this.limit(null);
      tree.reveal(node);
      if (isCall) tree.open(node);
      // With its caller open, one sees the line that calls.
      if (node.caller >= 0) {
        tree.reveal(tree.nodes[node.caller]);
        tree.open(tree.nodes[node.caller]);
      }
      const target = isCall ? node.item : document.getElementById(tree.id("message", number));
      for (const old of this.place.querySelectorAll(".u-here")) old.classList.remove("u-here");
      target.classList.add("u-here");
      (isCall ? node.head : target).scrollIntoView({ block: "center" });
      (isCall ? node.button : target).focus({ preventScroll: true });
      this.changed();
    }

    writeAddress(call = null) {
      const words = new URLSearchParams({ rank: this.tree.rank.rank });
      if (this.depth) words.set("depth", this.depth === Infinity ? "all" : this.depth);
      if (this.mb !== null) words.set("microbatch", this.mb);
      this.call = call;
      if (call !== null) words.set("call", call);
      history.replaceState(history.state, "", `#${words}`);
    }
  }

  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }

  // The data stand in the page itself, or in a script that was loaded before this one.
  async function mount() {
    const root = document.querySelector(".mm-unrolled"), own = document.getElementById("unrolled-data");
    if (!root) return;
    const data = own ? JSON.parse(own.textContent) : await unpack(MM.packed[`unrolled ${root.dataset.run}`]);
    root.mmUnrolled = new UnrolledPage(root, data);
  }

  if (document.readyState === "loading") addEventListener("DOMContentLoaded", mount);
  else mount();
})();
