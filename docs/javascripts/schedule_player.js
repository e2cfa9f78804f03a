"use strict";
// The schedule player: choose a plan and its costs, see when everything happens, ask why.
// Orders and formulas come from orders.js (the planner), times from engine.js, the picture from timeline.js.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const SCHEDULES = [["gpipe", "GPipe"], ["1f1b", "1F1B"], ["interleaved", "Interleaved"]];
  const PHASES = { warmup: "warm-up", steady: "steady state", cooldown: "cool-down" };
  const KINDS = { F: "forward", B: "backward" };
  const DEFAULTS = { schedule: "1f1b", p: 4, M: 8, v: 1, G: 0, overlap: 0, f: 1, b: 2, c: 0, cap: 0, link: "both", balance: "" };

  const round = (value) => String(Number(Number(value).toPrecision(5)));
  const number = (value) => (Math.abs(value) >= 1000 ? String(Math.round(value)) : round(Math.round(value * 1000) / 1000));
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const minus = (text) => text.replaceAll(" - ", " − ");

  MM.mountPlayer = function mountPlayer(root, options) {
    const player = new Player(root, options);
    root.mmPlayer = player;
    return player;
  };

  // Sizes that were planned: schedule -> [{p, M, v, G, overlap}], read off the keys of the plans.
  let offered = null;
  function offers(schedule) {
    if (!offered) {
      offered = {};
      for (const key of Object.keys(MM.orders.plans)) {
        const [name, p, M, v, G, overlap] = key.split(" ");
        (offered[name] ||= []).push({ p: +p, M: +M, v: +v, G: +G, overlap: overlap ? 1 : 0 });
      }
    }
    return offered[schedule];
  }
  const distinct = (list, name) => [...new Set(list.map((offer) => offer[name]))].sort((a, b) => a - b);
  const nearest = (values, wanted) => values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));

  class Player {
    constructor(root, options) {
      this.root = root;
      this.options = options;
      this.site = MM.base;
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
      if (options.hasAddress) addEventListener("hashchange", () => {
        if (this.written === location.hash || !location.hash.includes("schedule=")) return;
        this.state = { ...this.initial };
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
      if (!SCHEDULES.some(([name]) => name === this.state.schedule)) this.state.schedule = "1f1b";
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
      const name = `mmp-${Math.random().toString(36).slice(2, 8)}`;
      this.schedules = make("fieldset", { class: "mmp-segments" }, make("legend", { class: "mmp-hidden" }, "Schedule"),
        ...SCHEDULES.map(([value, words]) => make("label", {},
          make("input", { type: "radio", name, value, onchange: () => this.set("schedule", value) }), make("span", {}, words))));
      this.fields = {
        p: this.slider("Stages", "p", () => distinct(this.offersNow(), "p"), "p"),
        M: this.slider("Microbatches", "M", () => distinct(this.offersNow().filter((o) => o.p === this.state.p && o.v === this.state.v), "M"), "M"),
        v: this.choice("Chunks per stage", "v", "v"),
        G: this.choice("Group", "G", "G"),
      };
      const number = (label, key, letter, step = "0.25", title = null) => {
        const input = make("input", { type: "number", min: "0", step, inputmode: "decimal", oninput: () => this.set(key, Math.max(0, Number(input.value) || 0)) });
        this.fields[key] = { element: make("label", { class: "mmp-field", title }, make("span", {}, label, letter ? make("var", {}, ` ${letter}`) : null), input),
          show: () => { if (document.activeElement !== input) input.value = key === "cap" && !this.state.cap ? "" : this.state[key]; } };
        return this.fields[key].element;
      };
      this.overlap = make("input", { type: "checkbox", onchange: () => this.set("overlap", this.overlap.checked ? 1 : 0) });
      this.overlapField = make("label", { class: "mmp-switch" }, this.overlap, " messages travel while stages compute");
      this.link = make("select", { onchange: () => this.set("link", this.link.value) },
        make("option", { value: "both" }, "both ends wait (NCCL)"), make("option", { value: "buffered" }, "sends do not wait (gloo)"));
      this.balance = make("div", { class: "mmp-balance", role: "group", "aria-label": "Work per stage" });
      this.controls = make("div", { class: "mmp-controls" }, this.schedules, this.fields.p.element, this.fields.M.element,
        this.fields.v.element, this.fields.G.element);
      this.more = make("details", { class: "mmp-more" }, make("summary", {}, "Times, balance, memory"),
        make("div", { class: "mmp-grid" }, number("Forward", "f", "f"), number("Backward", "b", "b"), number("Message", "c", null, "0.05"),
          make("label", { class: "mmp-field" }, make("span", {}, "Links"), this.link),
          number("Memory cap, microbatches", "cap", null, "1"), this.overlapField),
        this.balance);
      this.build2();
    }

    build2() {
      this.timeline = new MM.Timeline({
        label: "Timeline of the schedule", describe: (id) => this.describe(id), choose: (id) => this.chosen(id),
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
      const tools = make("div", { class: "mmp-tools" }, this.quizButton,
        make("label", { class: "mmp-switch" }, this.critical, " Critical path"),
        make("button", { type: "button", onclick: () => this.saveSvg() }, "Save as SVG"),
        make("button", { type: "button", onclick: (event) => this.reset(event) }, "Reset"));
      this.table = make("div", { class: "mmp-table", tabindex: "0", role: "region", "aria-label": "Table" });
      this.twin = make("details", { class: "mmp-twin", ontoggle: () => this.drawTable() }, make("summary", {}, "The same as a table"), this.table);
      this.root.replaceChildren(make("div", { class: "mmp" }, this.controls, this.more, this.status, this.timeline.element, this.transport.element,
        this.legend, this.figures, tools, this.details, this.twin, this.timeline.help));
    }

    // A slider over the values that there are plans for.
    slider(label, key, values, letter) {
      const input = make("input", { type: "range", min: 0, step: 1, oninput: () => this.set(key, values()[input.value]) });
      const output = make("b", {});
      return { element: make("label", { class: "mmp-field mmp-range" }, make("span", {}, label, make("var", {}, ` ${letter}`), " ", output), input),
        show: () => {
          const list = values();
          input.max = list.length - 1;
          input.value = list.indexOf(this.state[key]);
          input.setAttribute("aria-valuetext", String(this.state[key]));
          output.textContent = this.state[key];
        } };
    }

    choice(label, key, letter) {
      const select = make("select", { onchange: () => this.set(key, Number(select.value)) });
      const element = make("label", { class: "mmp-field" }, make("span", {}, label, make("var", {}, ` ${letter}`)), select);
      return { element, show: () => {
        const { state } = this, isOn = state.schedule === "interleaved";
        element.hidden = !isOn;
        if (!isOn) return;
        const list = this.offersNow().filter((o) => o.p === state.p && (key === "v" || (o.v === state.v && o.M === state.M)));
        select.replaceChildren(...distinct(list, key).map((value) => make("option", { value, selected: value === state[key] }, String(value))));
      } };
    }

    offersNow() {
      const list = offers(this.state.schedule);
      return this.state.schedule === "interleaved" ? list : [...offers("no-pipelining"), ...list];
    }

    // -- State --

    set(key, value) {
      this.clock.pause();
      this.state[key] = value;
      this.timeline.marks.t = null;
      this.timeline.marks.chosen = null;
      const before = performance.now();
      this.update();
      this.root.dataset.redrawMs = (performance.now() - before).toFixed(1);
    }

    reset() {
      this.clock.pause();
      this.state = { ...this.initial };
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      this.critical.checked = false;
      if (this.quiz) this.togglePredict();
      this.update();
    }

    // Moves the sizes to the nearest ones that the planner has a plan for, and says so.
    settle() {
      const { state } = this, moved = [];
      const keep = (key, list) => {
        const value = nearest(list, state[key]);
        if (value !== state[key] && key === "M") moved.push(`M is ${value}: the planner has no such plan for ${state[key]}`);
        state[key] = value;
      };
      let list = this.offersNow();
      const isInterleaved = state.schedule === "interleaved";
      keep("p", distinct(list, "p"));
      list = list.filter((offer) => offer.p === state.p);
      if (!isInterleaved) Object.assign(state, { v: 1, G: 0, overlap: 0 });
      keep("v", distinct(list, "v"));
      list = list.filter((offer) => offer.v === state.v);
      keep("M", distinct(list, "M"));
      list = list.filter((offer) => offer.M === state.M);
      if (isInterleaved && !state.G) state.G = state.p;
      keep("G", distinct(list, "G"));
      list = list.filter((offer) => offer.G === state.G);
      keep("overlap", distinct(list, "overlap"));
      this.canOverlap = list.some((offer) => offer.overlap);
      this.note = moved.join(". ");
    }

    costs() {
      const { p, v, f, b, c } = this.state, factors = this.factors();
      const share = (time) => Array.from({ length: p }, (_, rank) => Array(v).fill((time * factors[rank]) / v));
      return { forward: share(f), backward: share(b), message: c };
    }

    factors() {
      const given = this.state.balance.split(",").map(Number);
      return Array.from({ length: this.state.p }, (_, rank) => (given[rank] > 0 ? given[rank] : 1));
    }

    update() {
      this.isFirst = !this.step;
      this.settle();
      const { state } = this;
      const schedule = state.p === 1 ? "no-pipelining" : state.schedule;
      this.plan = MM.engine.planOf(MM.orders, { ...state, schedule });
      this.step = MM.engine.simulate(this.plan, this.costs(), state.link === "buffered");
      this.schedule = schedule;
      this.endings = [...new Set(this.step.work.flatMap((list, rank) => list.map((a) => this.step.ends[rank][a.index])))].sort((a, b) => a - b);
      this.order = this.step.work.flat().sort((a, b) => this.step.endOf(a) - this.step.endOf(b) || a.rank - b.rank);
      this.shades = shadesOf(state.v);
      this.showControls();
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
      const parts = [MM.orders.names[this.schedule], `${p} stage${p > 1 ? "s" : ""}`];
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

    showControls() {
      for (const field of Object.values(this.fields)) field.show();
      for (const radio of this.schedules.querySelectorAll("input")) radio.checked = radio.value === this.state.schedule;
      this.overlap.checked = Boolean(this.state.overlap);
      this.overlapField.hidden = !this.canOverlap;
      this.link.value = this.state.link;
      const { p } = this.state, factors = this.factors();
      if (this.balance.childElementCount !== p + 1) {
        this.balance.replaceChildren(make("span", {}, "Work per stage"), ...factors.map((_, rank) => {
          const input = make("input", { type: "range", min: "0.25", max: "2", step: "0.25", "aria-label": `Work of stage ${rank}`, oninput: () => {
            const now = this.factors();
            now[rank] = Number(input.value);
            this.set("balance", now.every((factor) => factor === 1) ? "" : now.join(","));
          } });
          return make("label", {}, input, make("output", {}));
        }));
      }
      [...this.balance.querySelectorAll("label")].forEach((label, rank) => {
        label.firstChild.value = factors[rank];
        label.firstChild.setAttribute("aria-valuetext", `${factors[rank]} times`);
        label.lastChild.textContent = `${rank}: ×${factors[rank]}`;
      });
      const words = this.state.p === 1 ? "One stage: no pipeline, each backward follows its forward. " : "";
      this.status.textContent = words + this.note;
      this.status.hidden = !this.status.textContent;
    }

    showFigures() {
      const { step, plan, state } = this, f = plan.formulas;
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

    nameOf({ kind, mb, chunk }) {
      return `${kind}${mb}${this.state.v > 1 ? ` of chunk ${chunk}` : ""}`;
    }

    parse(id) {
      const [rank, rest] = id.split(":");
      return rest[0] === "g" ? { gap: this.step.gaps[rank][Number(rest.slice(1))] } : { action: this.plan.ranks[rank][Number(rest)] };
    }

    describe(id) {
      const { action, gap } = this.parse(id);
      if (gap) return { title: `Stage ${gap.rank} idle for ${number(gap.end - gap.start)}`, lines: [this.gapWords(gap)] };
      const { step } = this, words = `Stage ${action.rank}: ${KINDS[action.kind]} of microbatch ${action.mb}`;
      return { title: words + (this.state.v > 1 ? `, chunk ${action.chunk}` : ""),
        lines: [`${number(step.startOf(action))} to ${number(step.endOf(action))}, ${PHASES[action.phase]}`] };
    }

    gapWords(gap) {
      if (gap.before === null) return `Its work is done; the step ends with ${this.nameOf(this.plan.ranks[gap.waitsFor[0]][gap.waitsFor[1]])} on stage ${gap.waitsFor[0]}.`;
      const next = this.nameOf(this.plan.ranks[gap.rank][gap.before]);
      if (!gap.waitsFor) return `Until the first message arrives, for ${next}.`;
      const [rank, index] = gap.waitsFor, cause = this.nameOf(this.plan.ranks[rank][index]);
      if (rank === gap.rank) return `For messages, between its own ${cause} and ${next}.`;
      const message = this.state.c ? " and the message" : "";
      return `Before ${next}: waiting for ${cause} on stage ${rank}, which ends at ${number(this.step.ends[rank][index])}${message}.`;
    }

    chosen(id) {
      const related = new Set(), lines = [];
      if (id && this.timeline.cell(id)) {
        const { action, gap } = this.parse(id);
        this.details.replaceChildren(...(action ? this.actionDetails(action, related, lines) : this.gapDetails(gap, related)));
      } else if (!this.quiz) this.details.replaceChildren(make("p", { class: "mmp-empty" }, "Choose a bar or a gap: what it needs, why it waits, and the code that runs there."));
      this.details.hidden = Boolean(this.quiz) && !id;
      this.timeline.mark({ related, lines });
      this.writeAddress();
    }

    jump(place, words = null) {
      const action = Array.isArray(place) ? this.plan.ranks[place[0]][place[1]] : place;
      return make("button", { type: "button", class: "mmp-link", onclick: () => this.timeline.choose(`${action.rank}:${action.index}`) },
        words || `${this.nameOf(action)} on stage ${action.rank}`);
    }

    gapDetails(gap, related) {
      if (gap.waitsFor) related.add(gap.waitsFor.join(":"));
      if (gap.before !== null) related.add(`${gap.rank}:${gap.before}`);
      return [make("h3", {}, `Stage ${gap.rank} computes nothing for ${number(gap.end - gap.start)}`), make("p", {}, this.gapWords(gap)),
        gap.waitsFor ? make("p", {}, "Go to ", this.jump(gap.waitsFor)) : null].filter(Boolean);
    }

    actionDetails(action, related, lines) {
      const { step, plan } = this, { config } = plan;
      const link = (list) => list.map((what) => MM.engine.find(step, what)).filter(Boolean);
      const needs = link(MM.engine.needs(config, action)), users = link(MM.engine.neededBy(config, action));
      for (const other of [...needs, ...users]) related.add(`${other.rank}:${other.index}`);
      for (const other of needs) if (other.rank !== action.rank) lines.push({ a: { rank: other.rank, t: step.endOf(other) }, b: { rank: action.rank, t: step.startOf(action) } });
      for (const other of users) if (other.rank !== action.rank) lines.push({ a: { rank: action.rank, t: step.endOf(action) }, b: { rank: other.rank, t: step.startOf(other) } });
      const items = (list, none) => (list.length ? list.flatMap((other, place) => [place ? ", " : "", this.jump(other), ` (ends ${number(step.endOf(other))})`]) : [none]);
      const gap = step.gaps[action.rank].find((found) => found.before === action.index);
      const chain = this.chainOf(action);
      return [
        make("h3", {}, this.describe(`${action.rank}:${action.index}`).title),
        make("p", {}, `${number(step.startOf(action))} to ${number(step.endOf(action))}, ${PHASES[action.phase]}. `, gap ? `Idle before it for ${number(gap.end - gap.start)}. ${this.gapWords(gap)}` : ""),
        make("div", { class: "mmp-split" },
          make("dl", { class: "mmp-facts" },
            make("dt", {}, "Needs"), make("dd", {}, ...items(needs, "data only")),
            make("dt", {}, "Needed by"), make("dd", {}, ...items(users, "the optimizer step")),
            ...this.callFacts(action)),
          chain ? make("div", {}, make("p", { class: "mmp-head" }, "Call chain, into the annotated source"), MM.chain(chain, this.site)) : null),
      ];
    }

    // The communicator's calls on both sides of an action, with what they move.
    callFacts(action) {
      const actions = this.plan.ranks[action.rank], facts = [];
      const words = (call) => (call.messages.length ? call.messages.map((m) =>
        `${m.activation ? "activation" : "gradient"} of ${m.mb}${this.state.v > 1 ? `.${m.chunk}` : ""} ${m.send ? "→" : "←"} stage ${m.peer}`).join("; ") : "nothing to move here");
      for (const [label, call] of [["Call before", actions[action.index - 1]], ["Call after", actions[action.index + 1]]]) {
        if (call?.kind !== "C") continue;
        const chain = MM.links.chains[this.schedule]?.[`${call.call} ${call.phase}`];
        const [, url] = chain?.at(-1) ?? [];
        const name = make("code", {}, call.call);
        facts.push(make("dt", {}, label), make("dd", {}, url ? make("a", { href: this.site + url }, name) : name, ` ${words(call)}`));
      }
      return facts;
    }

    chainOf(action) {
      const chains = MM.links.chains[this.schedule];
      return chains?.[`${action.kind} ${action.phase}`] || Object.entries(chains || {}).find(([key]) => key.startsWith(`${action.kind} `))?.[1];
    }

    // -- Table, file --

    drawTable() {
      if (!this.twin.open) return;
      const { step } = this;
      this.table.replaceChildren(...step.work.map((work, rank) => {
        const gaps = new Map(step.gaps[rank].map((gap) => [gap.before, gap]));
        const last = gaps.get(null);
        const row = (cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
        const rows = work.map((a) => row([number(step.startOf(a)), number(step.endOf(a)), this.nameOf(a), PHASES[a.phase],
          gaps.has(a.index) ? this.gapWords(gaps.get(a.index)) : ""]));
        if (last) rows.push(row([number(last.start), number(last.end), "idle", "", this.gapWords(last)]));
        return make("table", {}, make("caption", {}, `Stage ${rank}: idle ${number(step.idle[rank])}, peak in flight ${step.peaks[rank]}`),
          make("thead", {}, make("tr", {}, ...["start", "end", "action", "phase", "idle before it"].map((words) => make("th", { scope: "col" }, words)))),
          make("tbody", {}, ...rows));
      }));
    }

    svg() {
      const facts = [...this.figures.children].map((entry) => [...entry.children].map((part) => part.textContent).join("  "));
      const marks = { ...this.timeline.marks, t: null, hover: null, chosen: null, related: null, lines: [] };
      return MM.draw.svgFile(this.view(), marks, MM.draw.readColours(this.timeline.box), this.shades, this.title(), facts);
    }

    saveSvg() {
      const { schedule, p, M, v } = this.state;
      MM.download(`${schedule}-p${p}-m${M}${v > 1 ? `-v${v}` : ""}.svg`, this.svg(), "image/svg+xml");
    }

    // -- Predicting --

    togglePredict() {
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
