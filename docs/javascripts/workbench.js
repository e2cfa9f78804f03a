"use strict";
// "Edit the Python": a reader writes a schedule or an order, the package's planner makes and checks its plan
// in this page, and the player draws it. Loaded by schedule_player.js on the first click; Python itself (Pyodide,
// in a worker, from this very site) on the first run. Its sizes and the texts to start from come from
// workbench_data.js, which docs/tools/player/browser_python.py writes.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words);
  const SIZES = ["schedule", "p", "M", "v", "G", "overlap"];
  const PATIENCE = 10; // seconds of planning, loading not counted
  const SHOWN = 6; // problems
  const KEY = "minimegatron.bench.";
  document.head.append(make("link", { rel: "stylesheet", href: `${MM.base}stylesheets/workbench.css` }));
  const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

  // -- Texts: the reader's own, per text to start from, also where the browser stores nothing --

  class Texts {
    constructor(originals) {
      this.originals = originals;
      this.memory = new Map();
      this.isStored = true;
    }

    read(key) {
      if (this.memory.has(key)) return this.memory.get(key);
      try {
        return localStorage.getItem(KEY + key);
      } catch {
        this.isStored = false;
        return null;
      }
    }

    put(key, text) {
      this.memory.set(key, text);
      try {
        if (text === null) localStorage.removeItem(KEY + key);
        else localStorage.setItem(KEY + key, text);
      } catch {
        this.isStored = false;
      }
    }

    has(name) { return name in this.originals; }
    of(name) { return this.read(name) ?? this.originals[name].source; }
    isEdited(name) { return this.read(name) !== null; }
    canUndo(name) { return this.read(`${name}.before`) !== null; }

    write(name, text) {
      this.put(name, text === this.originals[name].source ? null : text);
      this.put("last", name);
    }

    startAgain(name) {
      this.put(`${name}.before`, this.of(name));
      this.put(name, null);
    }

    // The text of before comes back; one that was written since takes its place.
    undo(name) {
      const before = this.read(`${name}.before`);
      this.put(`${name}.before`, this.read(name));
      this.write(name, before);
    }

    // What the reader worked at last, if there is anything.
    get last() {
      const name = this.read("last");
      return name && this.has(name) && this.isEdited(name) ? name : null;
    }
  }

  MM.Workbench = class Workbench {
    constructor(player) {
      const { texts, python } = MM.workbench;
      Object.assign(this, { player, made: null, wanted: null, asked: 0, isBusy: false, isReady: false, follows: false });
      this.texts = new Texts(texts);
      this.total = Object.values(python.sizes).reduce((sum, size) => sum + size, 0);
      this.hasKeys = !matchMedia("(pointer: coarse)").matches;
      this.why = location.protocol === "file:" ? say("bench.file") : python.isMissing ? say("bench.missing") : "";
      this.build(python);
      const { schedule } = player.state;
      this.start(this.texts.last ?? (this.texts.has(schedule) ? schedule : "1f1b"));
    }

    build(python) {
      const button = (name, act, css = null) => make("button", { type: "button", class: css, onclick: act }, say(name));
      this.text = make("textarea", { class: "mmp-code", rows: 18, spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off",
        "aria-label": say("bench.code"), oninput: () => this.edited(), onkeydown: (event) => this.key(event) });
      this.from = make("select", { onchange: () => this.start(this.from.value) }, ...["schedule", "order"].map((kind) => make("optgroup", { label: say(`bench.from.${kind}`) },
        ...Object.keys(this.texts.originals).filter((name) => this.texts.originals[name].kind === kind).map((name) => make("option", { value: name })))));
      this.again = button("bench.again", () => this.startAgain());
      this.undo = button("bench.undo", () => this.bringBack());
      this.go = button("bench.run", () => this.run(), "mmp-play");
      this.halt = button("bench.stop", () => this.stop());
      this.bar = make("progress", { "aria-label": say("bench.progress") });
      this.figure = make("span", { class: "mmp-remark" });
      this.progress = make("span", { class: "mmp-progress" }, this.bar, this.figure);
      this.remark = make("span", { class: "mmp-remark" }, this.why || `${say("bench.first", { name: python.name, megabytes: megabytes(this.total) })} ${this.keyWords}`);
      this.kept = make("span", { class: "mmp-remark" });
      this.verdict = make("div", { class: "mmp-verdict", role: "status" });
      this.go.disabled = Boolean(this.why);
      this.element = make("section", { class: "mmp-bench", tabindex: "-1", "aria-label": say("bench.name") },
        make("p", {}, say("bench.intro")), make("p", { class: "mmp-remark" }, say("bench.two")),
        make("div", { class: "mmp-tools" }, make("label", { class: "mmp-field mmp-inline" }, make("span", {}, say("bench.from")), this.from), this.again, this.undo, this.kept),
        this.text,
        make("div", { class: "mmp-tools" }, this.go, this.halt, this.progress, this.remark),
        this.verdict);
      this.showBusy();
    }

    // -- Open, closed --

    get keyWords() {
      return this.hasKeys ? say("bench.keys") : "";
    }

    get isOpen() {
      return this.element.isConnected;
    }

    open(before) {
      // Above the times: some of them come with a plan, and would push the text away.
      (this.player.controls.more ?? before).before(this.element);
      this.showStart();
      // A keyboard that comes up by itself would hide a small screen.
      (this.hasKeys ? this.text : this.element).focus();
    }

    close() {
      this.end();
      this.element.remove();
      this.made = null;
      this.verdict.replaceChildren();
      this.player.update();
    }

    // What the player shows in place of a schedule of its own: of its present sizes, or nothing.
    get plan() {
      return this.made && SIZES.every((key) => this.made.of[key] === this.player.state[key]) ? this.made : null;
    }

    // What the player shows has changed: a plan of other sizes is asked for anew.
    leave(key) {
      if (!SIZES.includes(key)) return;
      const isFollowing = this.follows && this.isOpen && key !== "schedule";
      this.made = this.wanted = null;
      this.follows = isFollowing;
      clearTimeout(this.later);
      if (isFollowing) this.later = setTimeout(() => this.run(false), 150);
      else if (key === "schedule" && this.isOpen) {
        this.verdict.replaceChildren();
        const { schedule } = this.player.state;
        if (this.texts.has(schedule) && !this.texts.isEdited(this.name)) this.start(schedule);
      }
    }

    // -- Text --

    start(name) {
      this.name = name;
      this.text.value = this.texts.of(name);
      this.showStart();
      this.verdict.replaceChildren();
      this.showTexts();
    }

    showStart() {
      this.text.setSelectionRange(0, 0);
      this.text.scrollTop = this.text.scrollLeft = 0;
    }

    edited() {
      this.texts.write(this.name, this.text.value);
      this.showTexts();
    }

    startAgain() {
      this.texts.startAgain(this.name);
      this.start(this.name);
      this.undo.focus();
    }

    bringBack() {
      this.texts.undo(this.name);
      this.start(this.name);
      this.text.focus();
    }

    showTexts() {
      const { texts } = this;
      for (const option of this.from.querySelectorAll("option")) {
        const name = MM.orders.names[option.value] ?? say(`bench.text.${option.value}`);
        option.textContent = texts.isEdited(option.value) ? say("bench.edited", { name }) : name;
      }
      this.from.value = this.name;
      this.again.disabled = !texts.isEdited(this.name);
      this.undo.hidden = !texts.canUndo(this.name);
      this.kept.textContent = texts.isEdited(this.name) ? say(texts.isStored ? "bench.kept" : "bench.not-kept") : "";
    }

    key(event) {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
      event.stopPropagation(); // the site has keys of its own
    }

    // -- Running it: one request at a time; the newest is asked for once Python is free --

    run(isAsked = true) {
      if (this.why) return;
      clearTimeout(this.later);
      const { p, M, v, G } = this.player.state;
      this.wanted = { number: ++this.asked, source: this.text.value, sizes: [p, M, v, G], isAsked, of: { ...this.player.state } };
      this.follows = true;
      if (this.isBusy) return;
      this.isBusy = true;
      if (!this.worker) this.startPython();
      else if (this.isReady) this.ask();
      this.showBusy();
    }

    startPython() {
      const worker = new Worker(`${MM.base}javascripts/python_worker.mjs`, { type: "module" });
      this.worker = worker;
      worker.onerror = (event) => this.giveUp(event.message || say("bench.failed"));
      worker.onmessage = ({ data }) => worker === this.worker && this.hear(data);
      worker.postMessage({ sizes: MM.workbench.python.sizes });
      this.verdict.replaceChildren(make("p", {}, say("bench.loading")));
      this.show(0);
    }

    ask() {
      if (!this.wanted) return this.rest();
      const { number, source, sizes } = this.wanted;
      this.worker.postMessage({ number, source, sizes });
    }

    hear({ loaded, starting, ready, number, begun, answer, failed }) {
      if (loaded !== undefined) this.show(loaded);
      else if (starting) this.countSeconds("bench.starting");
      else if (ready) {
        this.isReady = true;
        this.remark.textContent = this.keyWords;
        this.verdict.replaceChildren();
        this.ask();
      } else if (begun) {
        this.patience = setTimeout(() => this.giveUp(say("bench.patience", { n: PATIENCE })), 1000 * PATIENCE);
        this.countSeconds("bench.planning");
      } else if (failed !== undefined) this.giveUp(failed);
      else if (number !== this.wanted?.number) {
        clearTimeout(this.patience);
        this.ask();
      } else {
        const { wanted } = this;
        this.rest();
        this.take(JSON.parse(answer), wanted);
      }
    }

    // Nothing runs any more; Python stays.
    rest() {
      clearTimeout(this.patience);
      clearInterval(this.seconds);
      this.isBusy = false;
      this.wanted = null;
      this.showBusy();
    }

    // Python ends at once, whatever it does. The next run starts it again, from what the browser has kept.
    end() {
      clearTimeout(this.later);
      this.worker?.terminate();
      this.worker = null;
      this.isReady = this.follows = false;
      this.rest();
    }

    stop() {
      this.end();
      this.verdict.replaceChildren(make("p", {}, say("bench.stopped")));
      this.go.focus();
    }

    giveUp(words) {
      this.end();
      this.verdict.replaceChildren(make("p", { class: "mmp-not" }, words));
    }

    // -- How far it is: seen by who looks, not read out --

    showBusy() {
      this.element.setAttribute("aria-busy", String(this.isBusy));
      this.halt.hidden = this.progress.hidden = !this.isBusy;
      this.remark.hidden = this.isBusy;
    }

    show(loaded) {
      this.bar.max = this.total;
      this.bar.value = Math.min(loaded, this.total);
      this.figure.textContent = say("bench.loaded", { loaded: megabytes(this.bar.value), total: megabytes(this.total) });
    }

    countSeconds(name) {
      const begun = performance.now();
      const count = () => (this.figure.textContent = say(name, { n: Math.floor((performance.now() - begun) / 1000) }));
      this.bar.removeAttribute("value");
      clearInterval(this.seconds);
      this.seconds = setInterval(count, 250);
      count();
    }

    // -- What came of it --

    take(answer, { isAsked, of }) {
      const { player } = this, hadSplit = this.made?.hasSplit;
      if (SIZES.some((key) => of[key] !== player.state[key])) return this.run(isAsked);
      this.made = null;
      if (answer.rows) {
        const plan = MM.engine.decode(MM.orders, answer.rows, answer.placement, answer);
        const hasSplit = plan.letters.includes("I") || plan.hasPairs;
        this.made = { ...plan, name: answer.name, config: { schedule: "mine", p: of.p, M: of.M, v: answer.v, G: of.G }, mayStick: true, of, hasSplit };
        // Their times are to be chosen too.
        if (hasSplit && !hadSplit && player.controls.more) player.controls.more.open = true;
      }
      player.clock.pause();
      player.stopFollowing();
      Object.assign(player.timeline.marks, { t: null, chosen: null });
      player.update();
      this.showAnswer(answer, isAsked);
    }

    showAnswer(answer, isAsked) {
      const { line, name, problems } = answer, error = answer.say ? say(`bench.error.${answer.say}`, answer.values) : answer.error;
      if (error) {
        this.verdict.replaceChildren(make("p", {}, this.lineLink(line), error));
        if (line && isAsked) this.select(line);
      } else if (!problems.length)
        this.verdict.replaceChildren(make("p", {}, make("b", { class: "mmp-right" }, say("bench.right", { name })), ` ${say("bench.right.why")} ${this.compared()}`));
      else {
        const more = problems.length - SHOWN;
        this.verdict.replaceChildren(make("p", {}, make("b", { class: "mmp-not" }, say("bench.problems", { n: problems.length, name })), this.made ? "" : ` ${say("bench.not-drawn")}`),
          make("ul", {}, ...problems.slice(0, SHOWN).map((problem) => make("li", {}, this.lineLink(problem.line), make("b", {}, `${problem.kind}: `), problem.text)),
            more > 0 ? make("li", {}, say("bench.more", { n: more })) : null));
      }
    }

    compared() {
      const { player } = this, { state } = player, schedule = MM.drawnSchedule(state);
      const plan = MM.engine.planOf(MM.orders, { ...state, schedule });
      const theirs = MM.engine.simulate(plan, player.costs(plan.placement.stages[0].length), state.link === "buffered");
      return say("bench.compared", { time: MM.words.number(player.scene.step.makespan), other: MM.orders.names[schedule], otherTime: MM.words.number(theirs.makespan) });
    }

    lineLink(line) {
      return line ? [make("button", { type: "button", class: "mmp-link", onclick: () => this.select(line) }, say("bench.line", { line })), " "] : null;
    }

    select(line) {
      const lines = this.text.value.split("\n"), start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
      this.text.focus();
      this.text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
      const height = this.text.scrollHeight / lines.length;
      this.text.scrollTop = Math.max(0, (line - 4) * height);
    }
  };
})();
