"use strict";
// Search. The theme shows what a worker answers; this file stands in for that worker, in the page itself,
// so that search also runs in pages opened from a folder. The sections are in search/pages.js
// (docs/tools/search_index.py); both files are loaded when search is first opened (docs/overrides/main.html).
//
// A query becomes slots, one for each word or known phrase, each with its other spellings and meanings
// (docs/search_synonyms.toml). A section is worth what its slots are, times the weight of its kind of page:
// lessons stand before code, code before the reference.

(() => {
  const MM = (globalThis.MM ||= {});
  const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3; // The theme's messages.

  const WEIGHT = {
    symptoms: 3.6, tour: 3.2, glossary: 3, formulas: 2.4, home: 1.6, recipes: 1.6, exam: 1.4, problems: 1.4,
    teachers: 1, gpu: 1.1, notebooks: 1, exercises: 1, source: 1, rosetta: 0.7, reference: 0.4,
  };
  const LESSONS = new Set(["symptoms", "tour", "glossary"]);
  const FIRST = new Set([...LESSONS, "formulas"]);
  const CODE_HAS = 1.6; // A name in code that a lesson quotes.
  const OTHER_NAME = 0.9, MEANING = 0.8, WHOLE_QUERY = 6;
  const MOST_PAGES = 30, MOST_SECTIONS = 7, SHOWN = 2, TEASER = 220;

  // Said in questions, and found on every page.
  const STOP = new Set(("a an and are as at be but by can do does for from has have how i if in into is it its me my no not of " +
    "on or so that the their then there these they this to was what when where which who whom why will with you your").split(" "));

  const norm = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}_×]+/gu, " ").trim();
  const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  let sections = null;
  let phrases = null;

  function prepare() {
    if (sections) return;
    sections = [];
    for (const page of MM.searchData.pages) {
      page.plain = ` ${norm(page.title)} `;
      page.code = ` ${(page.names || "").toLowerCase()} `;
      page.weight = (WEIGHT[page.kind] ?? 1) * (page.url.includes("minimegatron.exercises.") ? 0.5 : 1);
      for (const [anchor, title, text] of page.sections) {
        const place = anchor === 0 ? title : anchor;
        sections.push({
          page, title, text, url: place ? `${page.url}#${place}` : page.url,
          plainTitle: ` ${norm(title)} `, plainText: ` ${norm(text)} `,
        });
      }
    }
    phrases = new Map();
    const learn = (from, to, weight) => {
      const known = phrases.get(norm(from)) || [];
      for (const words of to) if (norm(words) !== norm(from)) known.push([norm(words), weight]);
      phrases.set(norm(from), known);
    };
    for (const group of MM.searchData.same) for (const words of group) learn(words, group, OTHER_NAME);
    for (const [words, meant] of Object.entries(MM.searchData.means)) learn(words, meant, MEANING);
  }

  // -- The query --

  const singular = (word) => (word.length > 3 && /[^s]s$/.test(word) && !word.includes("_") ? word.slice(0, -1) : word);

  function slotsOf(query) {
    const words = norm(query).split(" ").filter(Boolean);
    const slots = [];
    for (let at = 0; at < words.length;) {
      let length = Math.min(5, words.length - at);
      let known;
      for (; length > 0; length -= 1) {
        const phrase = words.slice(at, at + length).join(" ");
        known = phrases.get(phrase) || phrases.get(singular(phrase));
        if (known) break;
      }
      const phrase = words.slice(at, at + Math.max(1, length)).join(" ");
      if (known || !STOP.has(phrase)) {
        const own = [...new Set([phrase, singular(phrase)])].map((form) => [form, 1]);
        slots.push({ forms: [...own, ...(known || [])], phrase });
      }
      at += Math.max(1, length);
    }
    if (!slots.length && words.length) slots.push({ forms: [[words.join(" "), 1]], phrase: words.join(" ") });
    return slots;
  }

  // -- What a section is worth --

  const IN_TITLE = { is: 14, has: 8, begins: 5, contains: 2.5, words: 3 };
  const IN_TEXT = { is: 2, has: 2, begins: 1.4, contains: 0.5, words: 1 };

  /** How well a text has a word or phrase; of a phrase that it does not have, all words count a little. */
  function match(text, form, points) {
    if (!text.includes(form)) {
      if (!form.includes(" ")) return 0;
      return form.split(" ").every((word) => text.includes(` ${word}`)) ? points.words : 0;
    }
    if (text.length === form.length + 2) return points.is;
    if (text.includes(` ${form} `)) return points.has;
    if (text.includes(` ${form}`)) return points.begins;
    return form.length > 3 ? points.contains : 0;
  }

  function worth(section, slot) {
    let best = 0;
    for (const [form, weight] of slot.forms) {
      const title = match(section.plainTitle, form, IN_TITLE);
      const top = match(section.page.plain, form, IN_TITLE);
      const text = match(section.plainText, form, IN_TEXT);
      const code = section.page.code.includes(` ${form} `) ? CODE_HAS : 0;
      // A page's title counts most where the page begins.
      const named = Math.max(title, section.title ? 0.5 * top : top);
      best = Math.max(best, weight * (Math.max(named, text, code) + (named ? 0.5 * text : 0)));
    }
    return best;
  }

  function search(query) {
    prepare();
    const slots = slotsOf(query);
    const whole = norm(query);
    if (!slots.length) return [];
    const values = sections.map((section) => slots.map((slot) => worth(section, slot)));
    const rarity = slots.map((_, i) => Math.log2(2 + sections.length / (1 + values.filter((v) => v[i]).length)));

    const found = new Map();
    sections.forEach((section, number) => {
      const value = values[number];
      if (!value.some(Boolean)) return;
      let entry = found.get(section.page);
      if (!entry) found.set(section.page, (entry = { page: section.page, hits: [], slots: slots.map(() => 0) }));
      let score = value.reduce((sum, x, i) => sum + x * rarity[i], 0);
      if (whole.includes(" ") && (section.plainTitle + section.plainText).includes(` ${whole} `)) score += WHOLE_QUERY;
      const covered = value.filter(Boolean).length / slots.length;
      entry.hits.push({ section, score: score * covered * section.page.weight, isWhole: covered === 1 });
      value.forEach((x, i) => { entry.slots[i] = Math.max(entry.slots[i], x * rarity[i]); });
    });

    const entries = [...found.values()];
    for (const entry of entries) {
      entry.hits.sort((a, b) => b.score - a.score);
      const covered = entry.slots.filter(Boolean).length / slots.length;
      entry.covers = covered === 1;
      // A page has more to say than its best section, if several sections speak of it.
      const spread = Math.min(3, entry.hits.length - 1) * 0.08;
      entry.score = (entry.hits[0].score + 0.3 * entry.page.weight * entry.slots.reduce((a, b) => a + b, 0)) * covered ** 2 * (1 + spread);
    }
    entries.sort((a, b) => b.score - a.score);
    return lessonsFirst(entries, whole).slice(0, MOST_PAGES).map((entry) => group(entry, slots));
  }

  /** A lesson stands first, or second behind the symbol whose name was typed, which may be defined on many pages. */
  function lessonsFirst(entries, whole) {
    if (!entries.length || FIRST.has(entries[0].page.kind)) return entries;
    const isLesson = (entry) => LESSONS.has(entry.page.kind);
    let place = entries.findIndex((entry) => isLesson(entry) && entry.covers);
    if (place < 0) place = entries.findIndex(isLesson);
    const isName = entries[0].hits[0].section.plainTitle === ` ${whole} `;
    if (place > 0) entries.splice(isName ? 1 : 0, 0, ...entries.splice(place, 1));
    return entries;
  }

  // -- What is shown --

  function marked(text, slots) {
    const forms = slots.flatMap((slot) => slot.forms.map(([form]) => form)).filter(Boolean).sort((a, b) => b.length - a.length);
    const pattern = forms.map((form) => form.split(" ").map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("[^\\p{L}\\p{N}_]+")).join("|");
    const parts = [];
    let at = 0;
    for (const hit of text.matchAll(new RegExp(`(?<![\\p{L}\\p{N}])(?:${pattern})`, "giu"))) {
      parts.push(escape(text.slice(at, hit.index)), `<mark data-md-highlight>${escape(hit[0])}</mark>`);
      at = hit.index + hit[0].length;
    }
    return parts.join("") + escape(text.slice(at));
  }

  /** The part of a text that has the first words that were looked for. */
  function teaser(text, slots) {
    if (!text) return "";
    const low = text.toLowerCase();
    const places = slots.flatMap((slot) => slot.forms.map(([form]) => low.indexOf(form))).filter((n) => n >= 0);
    let from = Math.max(0, (places.length ? Math.min(...places) : 0) - 60);
    if (from) from = text.indexOf(" ", from) + 1;
    const to = text.length - from <= TEASER ? text.length : text.lastIndexOf(" ", from + TEASER);
    return `<p>${from ? "… " : ""}${marked(text.slice(from, to), slots)}${to < text.length ? " …" : ""}</p>`;
  }

  function group(entry, slots) {
    const { page, hits } = entry;
    const kind = MM.strings?.[`search.kind.${page.kind}`] ? MM.say(`search.kind.${page.kind}`) : "";
    const where = [kind === page.title ? "" : kind, page.where].filter(Boolean).join(" · ");
    const top = {
      location: page.url, terms: {}, text: teaser(hits[0].section.title ? page.sections[0]?.[2] || "" : hits[0].section.text, slots),
      title: marked(page.title, slots) + (where ? ` <span class="mm-found">${escape(where)}</span>` : ""),
    };
    const named = hits.filter((hit) => hit.section.title).slice(0, MOST_SECTIONS);
    const shown = named.map((hit, place) => ({
      location: hit.section.url, terms: {}, title: marked(hit.section.title, slots), text: teaser(hit.section.text, slots),
      score: place < SHOWN && hit.score > 0.4 * hits[0].score ? entry.score : Math.min(hit.score, entry.score / 2),
    }));
    // The page itself is the answer where its title is: its sections are then folded.
    const isPage = !hits[0].section.title;
    if (isPage) for (const item of shown) item.score = Math.min(item.score, entry.score / 2);
    return [{ ...top, score: entry.score }, ...shown];
  }

  // -- In place of the worker --

  MM.search = search;
  MM.answerSearch = (message) => {
    if (message.type === SETUP) {
      prepare();
      return { type: READY };
    }
    return message.type === QUERY ? { type: RESULT, data: { items: search(message.data) } } : null;
  };
})();
