"use strict";
// The schedule player: choose a plan and its costs, see when everything happens, ask why.
// Orders and formulas come from orders.js (the planner), times from engine.js, the picture from timeline.js,
// choices from controls.js, words from explain.js; a reader's own plan from workbench.js, once asked for.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const KINDS = { F: "forward", B: "backward" };
  const DEFAULTS = { schedule: "1f1b", p: 4, M: 8, v: 1, G: 0, overlap: 0, f: 1, b: 2, c: 0, cap: 0, link: "both", balance: "" };

  const { round, number } = MM.words;
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const minus = (text) => text.replaceAll(" - ", " − ");

  MM.mountPlayer = function mountPlayer(root, options) {
    const player = new Player(root, options);
    root.mmPlayer = player;
    return player;
  };

  class Player {
    constructor(root, options) {
      this.root = root;
      this.options = options;
      this.state = { ...DEFAULTS };
      const given = { schedule: options.schedule, p: options.pp, M: options.microbatches, v: options.vpp, G: options.group,
        f: options.forward, b: options.backward, c: options.message, cap: options.cap };
      for (const [name, value] of Object.entries(given)) if (value) this.state[name] = name === "schedule" ? value : Number(value);
      this.initial = { ...this.state };
      if (options.hasAddress) this.readAddress();
      this.build();
      this.update();
      this.isFirst = false;
      if (options.predict !== undefined || this.wantsQuiz) this.togglePredict();
      if (options.hasAddress) addEventListener("hashchange", async () => {
        if (this.written === location.hash || !location.hash.includes("schedule=")) return;
        if (location.hash.includes("schedule=interleaved")) await MM.needOrders("interleaved");
        Object.assign(this.state, this.initial);
        this.readAddress();
        this.update();
      });
    }

    // -- Address --

    readAddress() {
      const found = new URLSearchParams(location.hash.slice(1));
      if (!found.has("schedule")) return;
      for (const name of Object.keys(DEFAULTS)) {
        if (!found.has(name)) continue;
        const value = found.get(name);
        this.state[name] = typeof DEFAULTS[name] === "number" ? Number(value) || 0 : value;
      }
      if (!MM.Controls.knows(this.state.schedule)) this.state.schedule = "1f1b";
      this.wanted = found.get("at");
      this.wantsQuiz = found.has("predict");
      if (found.has("t")) this.startAt = Number(found.get("t"));
    }

    // Not at every move of a slider: browsers allow only so many changes of the address.
    writeAddress() {
      if (!this.options.hasAddress || this.isFirst) return;
      clearTimeout(this.writing);
      this.writing = setTimeout(() => this.writeAddressNow(), 120);
    }

    writeAddressNow() {
      const words = new URLSearchParams({ schedule: this.state.schedule, p: this.state.p, M: this.state.M });
      for (const [name, value] of Object.entries(this.state))
        if (!words.has(name) && value !== DEFAULTS[name] && !(name === "G" && value === this.state.p)) words.set(name, value);
      const { chosen, t } = this.timeline.marks;
      if (t !== null && !this.clock.running) words.set("t", round(t));
      if (chosen) words.set("at", chosen);
      if (this.quiz) words.set("predict", "");
      this.written = `#${words}`;
      history.replaceState(history.state, "", this.written);
    }

    // -- Elements --

    build() {
      this.controls = new MM.Controls(this.state, (key, value) => this.set(key, value));
      this.explain = new MM.Explanation(this);
      this.timeline = new MM.Timeline({
        label: "Timeline of the schedule", describe: (id) => this.explain.describe(id), choose: (id) => this.chosen(id),
        keys: { " ": () => this.clock.toggle(this.timeline.marks.t), Enter: () => this.details.focus() },
      });
      this.clock = new MM.Clock({ span: () => this.step.makespan, next: (t) => this.endings.find((end) => end > t + 1e-9) ?? this.step.makespan,
        tick: (t) => this.seek(t, true), changed: () => {} });
      this.transport = MM.transport({ clock: this.clock, seek: (t) => this.seek(t), step: (direction) => this.stepBy(direction) });
      this.transport.now = () => this.timeline.marks.t;
      const running = this.clock.changed;
      this.clock.changed = (is) => { running(is); if (!is) this.writeAddress(); };
      this.figures = make("dl", { class: "mmp-figures" });
      this.status = make("p", { class: "mmp-status", role: "status" });
      this.legend = make("ul", { class: "mmp-legend", "aria-label": "Legend" });
      this.details = make("section", { class: "mmp-details", "aria-label": "Details", tabindex: "-1" });
      this.critical = make("input", { type: "checkbox", onchange: () => this.update() });
      this.quizButton = make("button", { type: "button", "aria-pressed": "false", onclick: () => this.togglePredict() }, "Predict the next action");
      this.benchButton = make("button", { type: "button", "aria-expanded": "false", onclick: () => this.toggleBench() }, "Edit the Python");
      const tools = make("div", { class: "mmp-tools" }, this.quizButton, this.benchButton,
        make("label", { class: "mmp-switch" }, this.critical, " Critical path"),
        make("button", { type: "button", onclick: () => this.saveSvg() }, "Save as SVG"),
        make("button", { type: "button", onclick: () => this.reset() }, "Reset"));
      this.table = make("div", { class: "mmp-table", tabindex: "0", role: "region", "aria-label": "Table" });
      this.twin = make("details", { class: "mmp-twin", ontoggle: () => this.drawTable() }, make("summary", {}, "The same as a table"), this.table);
      this.root.replaceChildren(make("div", { class: "mmp" }, this.controls.element, this.controls.more, this.status, this.timeline.element, this.transport.element,
        this.legend, this.figures, tools, this.details, this.twin, this.timeline.help));
    }

    // -- State --

    set(key, value) {
      if (key === "schedule" && !MM.hasOrders(value)) return MM.needOrders(value).then(() => this.set(key, value));
      this.clock.pause();
      this.state[key] = value;
      this.timeline.marks.t = null;
      this.timeline.marks.chosen = null;
      const before = performance.now();
      this.bench?.leave(key);
      this.update();
      this.root.dataset.redrawMs = (performance.now() - before).toFixed(1);
    }

    reset() {
      this.clock.pause();
      Object.assign(this.state, this.initial);
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      this.critical.checked = false;
      if (this.quiz) this.togglePredict();
      if (this.bench?.isOpen) this.toggleBench();
      this.update();
    }

    costs() {
      const { p, v, f, b, c } = this.state, factors = this.controls.factors();
      const share = (time) => Array.from({ length: p }, (_, rank) => Array(v).fill((time * factors[rank]) / v));
      return { forward: share(f), backward: share(b), message: c };
    }

    update() {
      this.isFirst = !this.step;
      this.note = this.controls.settle();
      const { state } = this;
      const schedule = state.p === 1 ? "no-pipelining" : state.schedule;
      this.plan = this.bench?.plan ?? MM.engine.planOf(MM.orders, { ...state, schedule });
      this.step = MM.engine.simulate(this.plan, this.costs(), state.link === "buffered");
      this.schedule = this.plan.name ? "mine" : schedule;
      this.endings = [...new Set(this.step.work.flatMap((list, rank) => list.map((a) => this.step.ends[rank][a.index])))].sort((a, b) => a - b);
      this.order = this.step.work.flat().sort((a, b) => this.step.endOf(a) - this.step.endOf(b) || a.rank - b.rank);
      this.shades = shadesOf(state.v);
      this.controls.show();
      const words = state.p === 1 ? "One stage: no pipeline, each backward follows its forward. " : "";
      this.status.textContent = words + this.note;
      this.status.hidden = !this.status.textContent;
      this.quiz?.restart();
      this.timeline.marks.critical = this.critical.checked ? new Set(MM.engine.criticalPath(this.step).map(([r, i]) => `${r}:${i}`)) : null;
      this.timeline.box.setAttribute("aria-label", `Timeline. ${this.title()}`);
      this.timeline.set(this.view(), this.shades, false); // drawn below, with what is chosen
      this.showFigures();
      this.showLegend();
      if (this.twin.open) this.drawTable();
      if (this.startAt !== undefined) this.timeline.marks.t = Math.min(this.startAt, this.step.makespan);
      delete this.startAt;
      this.showTime();
      const wanted = this.wanted;
      delete this.wanted;
      if (wanted && this.timeline.cell(wanted)) this.timeline.choose(wanted, true);
      else this.chosen(this.timeline.marks.chosen);
    }

    title() {
      const { p, M, v, G, overlap } = this.state;
      const parts = [this.plan.name ?? MM.orders.names[this.schedule], `${p} stage${p > 1 ? "s" : ""}`];
      if (v > 1) parts.push(`${v} chunks per stage`);
      parts.push(`${M} microbatch${M > 1 ? "es" : ""}${v > 1 ? ` in groups of ${G}` : ""}`);
      if (overlap) parts.push("messages overlapped");
      return parts.join(", ");
    }

    view() {
      const { step, state } = this;
      return {
        rows: step.work.map((work, rank) => ({
          name: `stage ${rank}`, note: this.quiz ? null : `idle ${number(step.idle[rank])}`,
          bars: work.map((a) => ({ s: step.starts[rank][a.index], l: step.ends[rank][a.index] - step.starts[rank][a.index],
            kind: a.kind, chunk: a.chunk, mb: a.mb, id: `${rank}:${a.index}` })),
          gaps: step.gaps[rank].map((gap, place) => ({ s: gap.start, l: gap.end - gap.start, id: `${rank}:g${place}` })),
          held: step.held[rank],
        })),
        span: step.makespan, v: state.v, most: Math.max(...step.peaks), cap: state.cap * state.v, words: (t) => round(t),
      };
    }

    // -- Showing --

    showFigures() {
      const { step, plan, state } = this, f = plan.formulas;
      if (!f) return this.showCounted();
      const value = (text) => { const [a, b = "1"] = text.split("/"); return Number(a) / Number(b); };
      const bubble = (name, counted) => {
        const [text, said] = f[name], is = Math.abs(value(said) - counted) < 1e-9;
        return is ? `= ${minus(text)}${said === text ? "" : ` = ${said}`}` : `${minus(text)} = ${percent(value(said))} with equal stages, free messages`;
      };
      const ideal = value(f.makespan[1]) * (state.f + state.b);
      const spanIs = Math.abs(ideal - step.makespan) < 1e-9;
      const [peakText, peaks] = f.peak;
      const unit = state.v > 1 ? `, each 1/${state.v} of a stage` : "";
      const over = state.cap ? step.peaks.filter((peak) => peak > state.cap * state.v).length : 0;
      this.show4([
        ["Step", number(step.makespan), spanIs ? `= ${minus(f.makespan[0])}` : `${minus(f.makespan[0])} = ${number(ideal)} with equal stages, free messages`],
        ["Bubble: idle / all time", percent(step.overTotal), bubble("total", step.overTotal)],
        ["Bubble: idle / computing", percent(step.overIdeal), bubble("ideal", step.overIdeal)],
        ["Peak in flight, per stage", step.peaks.join(" "), over
          ? `${over} stage${over > 1 ? "s" : ""} above the cap of ${state.cap * state.v}`
          : peaks.every((peak, rank) => peak === step.peaks[rank]) ? `= ${minus(peakText)}${unit}` : minus(peakText), over > 0],
      ]);
    }

    // A reader's own schedule has no formulas.
    showCounted() {
      const { step } = this, remark = step.plan.stuck ? "until it stands still" : "counted";
      this.show4([["Step", number(step.makespan), remark], ["Bubble: idle / all time", percent(step.overTotal), remark],
        ["Bubble: idle / computing", percent(step.overIdeal), remark], ["Peak in flight, per stage", step.peaks.join(" "), remark]]);
    }

    show4(entries) {
      this.figures.replaceChildren(...entries.map(([label, value, remark, isBad]) => make("div", { class: isBad ? "mmp-bad" : null },
        make("dt", {}, label), make("dd", { class: "mmp-value" }, value), make("dd", { class: "mmp-remark" }, remark))));
    }

    showLegend() {
      const entries = [];
      for (const kind of ["F", "B"])
        this.shades[kind].forEach(([fill], chunk) => entries.push([`background:${fill}`, this.state.v > 1 ? `${KINDS[kind]}, chunk ${chunk}` : KINDS[kind]]));
      entries.push(["", "idle", "mmp-idle"], ["", "activations held", "mmp-held"]);
      if (this.critical.checked) entries.push(["", "critical path", "mmp-critical"]);
      this.legend.replaceChildren(...entries.map(([style, words, css]) => make("li", {}, make("i", { style: style || null, class: css }), words)));
    }

    // -- Time --

    seek(t, isPlaying = false) {
      this.timeline.mark({ t: t >= this.step.makespan ? null : t });
      this.showTime();
      if (!isPlaying) this.writeAddress();
    }

    stepBy(direction) {
      const { marks } = this.timeline;
      if (direction === Infinity) return this.seek(this.step.makespan);
      if (direction === -Infinity) return this.seek(0);
      const t = marks.t ?? (direction > 0 ? 0 : this.step.makespan);
      const chosen = marks.chosen && !marks.chosen.includes("g") ? this.order.findIndex((a) => `${a.rank}:${a.index}` === marks.chosen) : -1;
      const isThere = chosen >= 0 && this.step.endOf(this.order[chosen]) === t;
      let next;
      if (isThere) next = chosen + direction;
      else next = direction > 0 ? this.order.findIndex((a) => this.step.endOf(a) > t + 1e-9) : this.order.findLastIndex((a) => this.step.endOf(a) < t - 1e-9);
      const action = this.order[next];
      if (!action) return this.seek(direction > 0 ? this.step.makespan : 0);
      marks.t = this.step.endOf(action);
      this.showTime();
      this.timeline.choose(`${action.rank}:${action.index}`);
    }

    showTime() {
      const { t } = this.timeline.marks;
      this.transport.show(t, `${number(t ?? this.step.makespan)} of ${number(this.step.makespan)}`);
    }

    // -- One action, one gap --

    chosen(id) {
      const related = new Set(), lines = [];
      if (id && this.timeline.cell(id)) {
        const { action, gap } = this.explain.parse(id);
        this.details.replaceChildren(...(action ? this.explain.actionDetails(action, related, lines) : this.explain.gapDetails(gap, related)));
      } else if (!this.quiz) this.details.replaceChildren(make("p", { class: "mmp-empty" }, "Choose a bar or a gap: what it needs, why it waits, and the code that runs there."));
      this.details.hidden = Boolean(this.quiz) && !id;
      this.timeline.mark({ related, lines });
      this.writeAddress();
    }

    // -- Table, file --

    drawTable() {
      if (this.twin.open) this.table.replaceChildren(...this.explain.tables());
    }

    svg() {
      const facts = [...this.figures.children].map((entry) => [...entry.children].map((part) => part.textContent).join("  "));
      const marks = { ...this.timeline.marks, t: null, hover: null, chosen: null, related: null, lines: [] };
      return MM.draw.svgFile(this.view(), marks, MM.draw.readColours(this.timeline.box), this.shades, this.title(), facts);
    }

    saveSvg() {
      const { p, M, v } = this.state;
      MM.download(`${this.plan.name ?? this.schedule}-p${p}-m${M}${v > 1 ? `-v${v}` : ""}.svg`, this.svg(), "image/svg+xml");
    }

    // -- The reader's own --

    // Loaded on the first click: a few kilobytes; Python itself only when it is asked to run.
    async toggleBench() {
      await Promise.all(["workbench_data.js", "workbench.js"].map((name) => MM.load(`javascripts/${name}`)));
      MM.workbench ||= await MM.engine.unpack(MM.packed.workbench);
      this.bench ||= new MM.Workbench(this);
      const isOpen = !this.bench.isOpen;
      this.benchButton.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) this.bench.open(this.status);
      else this.bench.close();
    }

    // -- Predicting --

    async togglePredict() {
      await MM.load("javascripts/predict.js");
      this.clock.pause();
      const isOn = !this.quiz;
      this.quizButton.setAttribute("aria-pressed", String(isOn));
      this.root.firstChild.classList.toggle("mmp-quizzing", isOn);
      if (isOn) {
        this.quiz = new MM.Quiz(this);
        this.transport.element.after(this.quiz.element);
        this.timeline.set(this.view(), this.shades);
        this.quiz.restart();
      } else {
        this.quiz.element.remove();
        this.quiz = null;
        Object.assign(this.timeline.marks, { hideFrom: null, ask: null, t: null });
        this.timeline.set(this.view(), this.shades);
        this.showTime();
      }
      this.timeline.marks.chosen = null;
      this.chosen(null);
    }
  }

  function shadesOf(v) {
    const { forward, backward } = MM.orders.shades[v];
    return { F: forward, B: backward };
  }
})();
