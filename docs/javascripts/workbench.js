"use strict";
// "Edit the Python": a reader writes a schedule, the package's planner makes and checks its plan in this
// page, and the player draws it. Loaded by schedule_player.js on the first click; Python itself (Pyodide,
// in a worker, from this very site) on the first run. Its sizes and the texts to start from come from
// workbench_data.js, which docs/tools/browser_python.py writes.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const SIZES = ["schedule", "p", "M", "v", "G", "overlap"];
  const PATIENCE = 10; // seconds of running, loading not counted

  MM.Workbench = class Workbench {
    constructor(player) {
      const { sources, python } = MM.workbench;
      this.player = player;
      this.plan = null;
      this.asked = 0;
      this.text = make("textarea", { class: "mmp-code", rows: 18, spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off",
        "aria-label": "A schedule in Python", onkeydown: (event) => this.key(event) });
      this.from = make("select", { onchange: () => this.start(this.from.value) },
        ...Object.keys(sources).map((name) => make("option", { value: name }, MM.orders.names[name])));
      this.go = make("button", { type: "button", class: "mmp-play", onclick: () => this.run() }, "Run");
      this.verdict = make("div", { class: "mmp-verdict", role: "status" });
      const why = location.protocol === "file:" ? "A page opened as a file may not run Python; serve the folder (python -m http.server) and come back." : python.missing;
      this.go.disabled = Boolean(why);
      this.element = make("section", { class: "mmp-bench", "aria-label": "A schedule of your own" },
        make("p", {}, "A schedule is a function of one stage that yields what this stage does, in order. Change it: the package's own planner checks it and the timeline shows it."),
        this.text,
        make("div", { class: "mmp-tools" }, this.go, make("label", { class: "mmp-field mmp-inline" }, make("span", {}, "Start from "), this.from),
          make("span", { class: "mmp-remark" }, why || `The first run loads Python (${python.name}, ${python.megabytes} MB) from this site. Ctrl+Enter runs.`)),
        this.verdict);
      this.start(player.state.schedule);
    }

    get isOpen() {
      return this.element.isConnected;
    }

    open(before) {
      before.before(this.element);
      this.text.focus();
    }

    close() {
      this.element.remove();
      this.plan = null;
      this.worker?.terminate();
      this.worker = null;
      this.player.update();
    }

    start(name) {
      this.from.value = name;
      this.given = this.text.value = MM.workbench.sources[name];
      this.verdict.replaceChildren();
    }

    // What the player shows has changed: a plan of other sizes is asked for anew.
    leave(key) {
      if (!SIZES.includes(key)) return;
      const wasShown = this.plan;
      this.plan = null;
      this.asked++;
      if (key === "schedule") {
        if (this.isOpen && this.text.value === this.given) this.start(this.player.state.schedule);
      } else if (wasShown && this.isOpen) {
        clearTimeout(this.later);
        this.later = setTimeout(() => this.run(), 150);
      }
    }

    key(event) {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
      event.stopPropagation(); // the site has keys of its own
    }

    // -- Running it --

    async run() {
      if (this.go.disabled) return;
      const number = ++this.asked, { p, M, v, G } = this.player.state;
      this.say(this.worker ? "Running …" : `Loading Python, ${MM.workbench.python.megabytes} MB …`);
      let answer;
      try {
        answer = await this.ask({ number, source: this.text.value, sizes: [p, M, v, G] });
      } catch (error) {
        answer = { error: error.message };
      }
      if (number !== this.asked) return;
      this.plan = answer.ranks ? { name: answer.name, config: { schedule: "mine", p, M, v, G }, ranks: answer.ranks, batched: answer.batched, mayStick: true } : null;
      this.player.clock.pause();
      Object.assign(this.player.timeline.marks, { t: null, chosen: null });
      this.player.update();
      this.show(answer);
    }

    ask(request) {
      this.worker ||= new Worker(`${MM.base}javascripts/python_worker.mjs`, { type: "module" });
      const { worker } = this;
      return new Promise((resolve, reject) => {
        let patience;
        const giveUp = (words) => {
          clearTimeout(patience);
          worker.terminate();
          if (this.worker === worker) this.worker = null;
          reject(new Error(words));
        };
        worker.onerror = (event) => giveUp(event.message || "Python did not load.");
        worker.onmessage = ({ data }) => {
          if (data.begun) patience = setTimeout(() => giveUp(`It ran for ${PATIENCE} s and was stopped. Does a loop never end?`), 1000 * PATIENCE);
          else if (data.failed) giveUp(data.failed);
          else if (data.number === request.number) {
            clearTimeout(patience);
            resolve(JSON.parse(data.answer));
          }
        };
        worker.postMessage(request);
      });
    }

    // -- What came of it --

    say(...words) {
      this.verdict.replaceChildren(make("p", {}, ...words));
    }

    show({ error, line, name, problems }) {
      if (error) {
        this.say(make("b", { class: "mmp-not" }, line ? `Line ${line}: ` : ""), error);
        if (line) this.select(line);
      } else if (!problems.length) this.say(make("b", { class: "mmp-right" }, `${name} is right. `), `Each microbatch is done once, each message is met, nobody waits for ever. ${this.compared()}`);
      else {
        const first = problems.slice(0, 6), more = problems.length - first.length;
        this.verdict.replaceChildren(make("p", {}, make("b", { class: "mmp-not" }, `${problems.length} problem${problems.length > 1 ? "s" : ""} in ${name}.`), this.plan ? "" : " Not drawn."),
          make("ul", {}, ...first.map(({ kind, text }) => make("li", {}, make("b", {}, `${kind}: `), text)), more ? make("li", {}, `and ${more} more`) : null));
      }
    }

    compared() {
      const { player } = this, { state } = player, schedule = state.p === 1 ? "no-pipelining" : state.schedule;
      const theirs = MM.engine.simulate(MM.engine.planOf(MM.orders, { ...state, schedule }), player.costs(), state.link === "buffered");
      return `It takes ${MM.words.number(player.step.makespan)}; ${MM.orders.names[schedule]} takes ${MM.words.number(theirs.makespan)}.`;
    }

    select(line) {
      const lines = this.text.value.split("\n"), start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
      this.text.focus();
      this.text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    }
  };
})();
