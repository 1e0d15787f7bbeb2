// Ranks pages and sections by the rare words of the query that they contain. Sphinx itself lists only pages that
// contain every word, so that a question in a whole sentence finds nothing.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.performTermsSearch = (searchTerms, excludedTerms) => {
    const { terms, titleterms, titles, alltitles, docnames, filenames } = Search._index;
    const filesOf = (table, word) => (Object.hasOwn(table, word) ? [table[word]].flat() : []);
    const lengths = docnames.map(() => 0);
    Object.values(terms).forEach((files) => [files].flat().forEach((file) => (lengths[file] += 1)));
    const mean = lengths.reduce((sum, one) => sum + one, 0) / lengths.length;
    const scores = docnames.map(() => 0), matched = docnames.map(() => 0), weights = new Map();
    let total = 0;
    for (const word of searchTerms) {
      let inText = filesOf(terms, word), share = 1;
      const inTitle = new Set(filesOf(titleterms, word));
      if (!inText.length && !inTitle.size && word.length > 3) {
        inText = Object.keys(terms).filter((one) => one.startsWith(word)).flatMap((one) => filesOf(terms, one));
        share = 0.5;
      }
      const files = new Set([...inText, ...inTitle]);
      if (!files.size) continue;
      const weight = Math.log(1 + docnames.length / files.size);
      weights.set(word, weight);
      total += weight;
      for (const file of files) {
        matched[file] += weight;
        scores[file] += share * weight * (inTitle.has(file) ? 2.5 : 1);
      }
    }
    const excluded = new Set([...excludedTerms].flatMap((word) => filesOf(terms, word)));
    const results = [];
    docnames.forEach((name, file) => {
      if (!total || matched[file] < 0.35 * total || excluded.has(file)) return;
      // Pages about the code come after pages about its use.
      const inside = /^(docs\/design|bert_jax|data_pipeline|CONTRIBUTING)/.test(name) ? 0.7 : 1;
      const score = (10 * inside * scores[file]) / total / Math.sqrt(0.5 + (0.5 * lengths[file]) / mean);
      results.push([name, titles[file], "", null, score, filenames[file], SearchResultKind.text]);
    });
    const stemmer = new Stemmer();
    for (const [title, places] of Object.entries(alltitles)) {
      const own = new Set(splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word)));
      const share = [...weights].reduce((sum, [word, weight]) => sum + (own.has(word) ? weight : 0), 0) / total;
      if (!(share >= 0.5)) continue;
      for (const [file, id] of places) {
        // Headings of the changelog ("Added") answer no question.
        if (id === null || titles[file] === title || excluded.has(file) || docnames[file] === "CHANGELOG") continue;
        const score = 20 * share + 8 * Math.min(1, weights.size / own.size);
        const name = `${titles[file]} > ${title}`;
        results.push([docnames[file], name, `#${id}`, null, score, filenames[file], SearchResultKind.title]);
      }
    }
    return results;
  };
  // The excerpt is the part of a page with the most words of the query. A hit of a whole page leads to the section with
  // the rarest of these words, and names it.
  Search.makeSearchSummary = (html, words, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const root = (anchor && page.getElementById(anchor.slice(1))) || page.querySelector('[role="main"]');
    if (!root) return null;
    root.querySelectorAll(".headerlink, script, style").forEach((one) => one.remove());
    const sections = [...root.querySelectorAll("section[id]")].map((one) => {
      const own = one.cloneNode(true);
      own.querySelectorAll("section").forEach((inner) => inner.remove());
      return { id: one.id, title: own.querySelector("h1, h2, h3, h4")?.textContent.trim(), text: own.textContent };
    });
    const begins = [...words].map((word) => word.replace(/(?<=[a-z]{3})(i|(?<=b)l)$/, ""));
    const known = begins.map((word) => {
      const having = sections.filter((one) => one.text.toLowerCase().includes(word)).length;
      return [word, having ? Math.log(1 + sections.length / having) : 0];
    });
    const sum = (text) => known.reduce((total, [word, weight]) => total + (text.includes(word) ? weight : 0), 0);
    const score = (one) => sum(one.text.toLowerCase()) + sum((one.title || "").toLowerCase());
    const best = sections.reduce((first, one) => (!first || score(one) > score(first) ? one : first), null);
    const text = (!anchor && best ? best.text : root.textContent).replace(/\s+/g, " ").trim(), width = 240;
    if (!text) return null;
    const lower = text.toLowerCase(), starts = [0];
    for (const [word] of known)
      for (let i = lower.indexOf(word); i >= 0; i = lower.indexOf(word, i + 1)) starts.push(i);
    const near = (first) => sum(lower.slice(first, first + width - 40));
    const start = starts.reduce((first, i) => (near(i) > near(first) ? i : first));
    const begin = Math.max(0, start - 40);
    const summary = document.createElement("p");
    summary.classList.add("context");
    const shown = text.slice(begin, begin + width).trim();
    summary.textContent = `${begin ? "..." : ""}${shown}${begin + width < text.length ? "..." : ""}`;
    const leads = !anchor && best && best !== sections[0];
    setTimeout(() => {  // after Sphinx has added the summary to the list
      const link = summary.closest("li")?.querySelector("a");
      if (!link) return;
      const place = leads ? `${link.href.split("#")[0]}#${best.id}` : link.href;
      // A section that is a hit itself, before or after the hit of its page, is listed once.
      if ([...document.querySelectorAll("ul.search > li > a")].some((one) => one !== link && one.href === place))
        return summary.closest("li").remove();
      if (!leads) return;
      link.href = place;
      link.textContent += ` > ${best.title}`;
    });
    return summary;
  };
});
