"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const {tokens, layers, heads} = data;
const size = tokens.length;
const values = Uint8Array.from(atob(find("values").textContent), (c) => c.charCodeAt(0));
const percent = (p) => `${(100 * p).toFixed(p < 0.0995 ? 1 : 0)}%`;
// Column heads + 1 of a layer is its rollout.
const matrixOf = (layer, head) => values.subarray(((layer - 1) * (heads + 1) + head - 1) * size * size,
  ((layer - 1) * (heads + 1) + head) * size * size);
const share = (matrix, from, to) => (matrix[from * size + to] / 255) ** 2;
const state = {layer: data.layer, head: data.head, from: -1, token: 0};
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));

function add(parent, name, text = "", attributes = {}) {
  const node = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = style("--soft");
  context.font = `12px ${style("--font")}`;
  context.textBaseline = "middle";
  return context;
}

function imageOf(matrix, colors) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < matrix.length; i++) pixels[i] = colors[matrix[i]];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function palette() {
  const [low, high] = [rgb(style("--card")), rgb(style("--full"))];
  const bytes = new Uint8ClampedArray(1024);
  for (let v = 0; v < 256; v++) bytes.set([...low.map((c, i) => c + (high[i] - c) * v / 255), 255], 4 * v);
  return new Uint32Array(bytes.buffer);
}

// ------------------------------------------------------------------ all heads

let cell = 0;
const LEFT = 24, TOP = 18;

function drawGrid() {
  const canvas = find("grid"), width = canvas.parentElement.clientWidth - 28, colors = palette();
  cell = Math.min(84, (width - LEFT) / (heads + 1.3));
  const context = sized(canvas, LEFT + cell * (heads + 1.3), TOP + cell * layers);
  context.imageSmoothingEnabled = false;
  context.textAlign = "center";
  for (let head = 1; head <= heads + 1; head++) {
    context.fillText(head > heads ? "R" : head, column(head) + cell / 2, 8);
  }
  context.textAlign = "right";
  for (let layer = 1; layer <= layers; layer++) {
    context.fillStyle = style("--soft");
    context.fillText(layer, LEFT - 6, TOP + cell * (layer - 0.5));
    for (let head = 1; head <= heads + 1; head++) {
      const box = [column(head) + 1, TOP + cell * (layer - 1) + 1, cell - 2, cell - 2];
      context.drawImage(imageOf(matrixOf(layer, head), colors), ...box);
      const chosen = layer === state.layer && head === state.head;
      context.strokeStyle = style(chosen ? "--mark" : "--line");
      context.lineWidth = chosen ? 2.5 : 1;
      context.strokeRect(...box);
    }
  }
}

const column = (head) => LEFT + cell * (head - 1 + (head > heads ? 0.3 : 0));

function chooseInGrid(event) {
  const layer = Math.floor((event.offsetY - TOP) / cell) + 1;
  for (let head = 1; head <= heads + 1; head++) {
    if (layer >= 1 && layer <= layers && event.offsetX >= column(head) && event.offsetX < column(head) + cell) {
      choose(layer, head);
    }
  }
}

function choose(layer, head) {
  Object.assign(state, {layer, head});
  find("layer").value = layer;
  find("head").value = head;
  drawAttention();
}

// ------------------------------------------------------------------ one head

let frame = {left: 0, top: 0, cell: 1};

function drawMatrix() {
  const canvas = find("matrix"), width = canvas.parentElement.clientWidth - 28;
  const measured = canvas.getContext("2d");
  measured.font = `12px ${style("--font")}`;
  const longest = Math.min(90, Math.max(...tokens.map((token) => measured.measureText(token).width)) + 6);
  const hasLabels = (width - longest) / size >= 14;
  const room = hasLabels ? longest : 0, step = Math.min(34, (width - room) / size);
  frame = {left: room, top: room, cell: step};
  const context = sized(canvas, room + step * size, room + step * size);
  const matrix = matrixOf(state.layer, state.head);
  context.imageSmoothingEnabled = false;
  context.drawImage(imageOf(matrix, palette()), room, room, step * size, step * size);
  context.strokeStyle = style("--line");
  context.strokeRect(room, room, step * size, step * size);
  if (!hasLabels) return;
  const fitted = tokens.map((token) => {
    let text = token;
    while (text.length > 1 && context.measureText(text).width > room - 5) text = [...text].slice(0, -1).join("");
    return text;
  });
  fitted.forEach((text, i) => {
    context.textAlign = "right";
    context.fillText(text, room - 5, room + step * (i + 0.5));
    context.save();
    context.translate(room + step * (i + 0.5), room - 5);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(text, 0, 0);
    context.restore();
  });
}

function readCell(event) {
  const from = Math.floor((event.offsetY - frame.top) / frame.cell);
  const to = Math.floor((event.offsetX - frame.left) / frame.cell);
  if (from < 0 || to < 0 || from >= size || to >= size) return;
  const p = share(matrixOf(state.layer, state.head), from, to);
  const line = find("read");
  line.replaceChildren();
  add(line, "bdi", tokens[from], {style: "font-weight: 600"});
  line.append(` (token ${from + 1}) ${state.head > heads ? "contains" : "attends to"} `);
  add(line, "bdi", tokens[to], {style: "font-weight: 600"});
  line.append(` (token ${to + 1}): ${percent(p)}`);
}

function drawLines() {
  const svg = find("lines"), matrix = matrixOf(state.layer, state.head), width = svg.parentElement.clientWidth * 0.28;
  svg.setAttribute("width", width);
  svg.setAttribute("height", 20 * size);
  svg.replaceChildren();
  const least = state.from < 0 ? 0.1 : 0.01, skips = find("special").checked;
  for (let from = 0; from < size; from++) {
    if (state.from >= 0 && from !== state.from || skips && data.special[from]) continue;
    for (let to = 0; to < size; to++) {
      const p = share(matrix, from, to);
      if (p < least || skips && data.special[to]) continue;
      add(svg, "line", "", {x1: 4, x2: width - 4, y1: 20 * from + 10, y2: 20 * to + 10, stroke: style("--full"),
        "stroke-width": 1 + 2 * p, "stroke-opacity": Math.min(1, 0.15 + p)});
    }
  }
  for (const [i, item] of [...find("from").children].entries()) item.className = i === state.from ? "chosen" : "";
}

// What a head gives to the special tokens, which often is most of its attention.
function onSpecial(own, equal) {
  const names = new Set(tokens.filter((token, i) => data.special[i]));
  if (!names.size || !data.special.includes(false)) return "";
  return ` ${percent(own)} of the attention of the other tokens goes to ${[...names].join(" and ")} `
    + `(equal attention: ${percent(equal)}).`;
}

function describe() {
  const {layer, head} = state, line = find("numbers"), windowed = data.windows[layer - 1];
  const own = data.numbers[layer - 1][head - 1];
  const equal = data.equal[layer - 1];
  line.textContent = own ? `Layer ${layer}, head ${head}: entropy ${own[0].toFixed(2)} nats (equal attention: `
    + `${equal[0].toFixed(2)}), mean distance ${own[1].toFixed(1)} tokens (equal attention: ${equal[1].toFixed(1)}).${onSpecial(own[2], equal[2])}`
    : `Rollout through layers 1 to ${layer}: the share of each input token (column) `
    + `in each token after layer ${layer} (row).`;
  if (windowed) line.textContent += ` This layer attends to at most ${windowed} tokens on each side.`;
}

function drawAttention() {
  drawGrid();
  drawMatrix();
  drawLines();
  describe();
  plot("entropies", 0, "entropy, nats");
  plot("distances", 1, "mean distance, tokens");
}

// ------------------------------------------------------------------ all heads in numbers

function plot(id, which, label) {
  const svg = find(id), width = svg.parentElement.clientWidth - 28, height = 240, left = 34, bottom = 36;
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  const most = Math.max(1e-9, ...data.numbers.flat().concat(data.equal).map((own) => own[which])) * 1.08;
  const x = (layer) => left + 10 + (width - left - 20) * (layer - 0.5) / layers;
  const y = (value) => height - bottom - (height - bottom - 22) * value / most;
  add(svg, "text", label, {x: 0, y: 12});
  const unit = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((one) => one >= most / 4.5);
  for (let value = 0; value <= most; value += step) {
    add(svg, "line", "", {x1: left, x2: width, y1: y(value), y2: y(value), class: "axis"});
    add(svg, "text", +value.toPrecision(3), {x: left - 6, y: y(value) + 4, "text-anchor": "end"});
  }
  const every = Math.ceil(22 * layers / (width - left));
  for (let layer = 1; layer <= layers; layer += every) {
    add(svg, "text", layer, {x: x(layer), y: height - 20, "text-anchor": "middle"});
  }
  add(svg, "text", "layer", {x: width, y: height - 4, "text-anchor": "end"});
  data.equal.forEach((equal, i) => {
    const dash = add(svg, "line", "", {x1: x(i + 1) - 14, x2: x(i + 1) + 14, y1: y(equal[which]), y2: y(equal[which]),
      class: "equal"});
    add(dash, "title", `equal attention in layer ${i + 1}: ${equal[which].toFixed(2)}`);
  });
  data.numbers.forEach((row, i) => row.forEach((own, j) => {
    const on = i + 1 === state.layer && j + 1 === state.head;
    const dot = add(svg, "circle", "", {cx: x(i + 1), cy: y(own[which]), r: on ? 7 : 5, class: on ? "dot on" : "dot"});
    add(dot, "title", `layer ${i + 1}, head ${j + 1}: ${own[which].toFixed(2)}`);
    dot.addEventListener("click", () => choose(i + 1, j + 1));
  }));
}

// ------------------------------------------------------------------ words

function drawNearest() {
  const {words, sources, indices, cosines, medians, random, above} = data.nearest, body = find("near");
  [...find("chips").children].forEach((chip, i) => { chip.className = i === state.token ? "chosen" : ""; });
  body.replaceChildren();
  sources.forEach((source, row) => {
    const line = add(body, "tr");
    add(line, "th", source);
    const list = add(line, "td");
    indices[row][state.token].forEach((word, i) => {
      const item = add(list, "span");
      add(item, "bdi", words[word]);
      item.append(" ");
      add(item, "small", (cosines[row][state.token][i] / 100).toFixed(2));
      list.append(" ");
    });
    const compared = [[medians[row][state.token]], random[row][state.token]];
    for (const own of compared) add(line, "td", own.map((cosine) => (cosine / 100).toFixed(2)).join(", "));
  });
  const own = sources.filter((source, row) => above[row][state.token]), line = find("verdict");
  line.replaceChildren("For the token ");
  add(line, "bdi", tokens[state.token]);
  line.append(`, ${own.length ? `these rows are above: ${own.join(", ")}` : "no row is above"}.`);
}

function drawMap() {
  const {words, points} = data.map, svg = find("map"), width = svg.parentElement.clientWidth - 28;
  const height = Math.min(620, Math.max(320, width * 0.7));
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  const spans = [0, 1].map((axis) => {
    const own = points.map((point) => point[axis]);
    return [Math.min(...own), Math.max(...own) - Math.min(...own) || 1];
  });
  const placed = points.map((point) => [12 + (width - 24) * (point[0] - spans[0][0]) / spans[0][1],
    height - 16 - (height - 32) * (point[1] - spans[1][0]) / spans[1][1]]);
  const taken = placed.map(([x, y]) => [x - 3, y - 3, x + 3, y + 3]);
  placed.forEach(([x, y], i) => {
    const dot = add(svg, "circle", "", {cx: x, cy: y, r: 3.5});
    add(dot, "title", words[i]);
    const text = add(svg, "text", words[i], {class: "word"});
    const length = text.getComputedTextLength();
    // The first place beside the dot that no other dot or label has; a word without one is shown by its dot only.
    const places = [[7, 4], [-7 - length, 4], [-length / 2, -8], [-length / 2, 18], [7, -7], [7, 15],
      [-7 - length, -7], [-7 - length, 15]];
    const box = places.map(([dx, dy]) => [x + dx, y + dy - 12, x + dx + length, y + dy + 3]).find((one) =>
      one[0] >= 0 && one[2] <= width && one[1] >= 0 && one[3] <= height && taken.every((other) =>
        one[2] < other[0] || one[0] > other[2] || one[3] < other[1] || one[1] > other[3]));
    if (!box) { text.remove(); return; }
    taken.push(box);
    text.setAttribute("x", box[0]);
    text.setAttribute("y", box[1] + 12);
  });
}

// ------------------------------------------------------------------ start

function draw() {
  if (find("grid")) drawAttention();
  if (find("chips")) drawNearest();
  if (find("map")) drawMap();
}

if (find("grid")) {
  for (const [id, count] of [["layer", layers], ["head", heads]]) {
    for (let i = 1; i <= count; i++) add(find(id), "option", i, {value: i});
  }
  add(find("head"), "option", "rollout", {value: heads + 1});
  for (const id of ["layer", "head"]) {
    find(id).value = state[id];
    find(id).addEventListener("change", () => choose(+find("layer").value, +find("head").value));
  }
  for (const id of ["from", "to"]) {
    tokens.forEach((token, i) => {
      const item = add(find(id), "li");
      add(item, "bdi", token);
      if (id === "from") item.addEventListener("click", () => { state.from = state.from === i ? -1 : i; drawLines(); });
    });
  }
  for (const [name, layer, head, ...means] of data.patterns) {
    const line = add(find("patterns"), "tr");
    add(add(line, "td"), "button", name).addEventListener("click", () => choose(layer, head));
    for (const text of [`${layer}, ${head}`, ...means.map(percent)]) add(line, "td", text);
  }
  find("equal").textContent = `The mark is ${percent(1 / data.read)}: equal attention to all ${data.read} tokens.`;
  find("special").addEventListener("change", drawLines);
  find("grid").addEventListener("click", chooseInGrid);
  for (const kind of ["click", "mousemove"]) find("matrix").addEventListener(kind, readCell);
  const at = `${100 / Math.sqrt(data.read)}%`;
  find("scale").style.background = `linear-gradient(var(--mark), var(--mark)) ${at} 0 / 3px 100% no-repeat, `
    + "linear-gradient(to right, var(--card), var(--full))";
}
if (find("chips")) {
  tokens.forEach((token, i) => {
    add(find("chips"), "button", token, {dir: "auto"}).addEventListener("click", () => { state.token = i; drawNearest(); });
  });
  // The longest ordinary token, which tells more than an article.
  const lengths = tokens.map((token, i) => data.special[i] ? 0 : token.length);
  state.token = lengths.indexOf(Math.max(...lengths));
}
draw();
let drawnWidth = document.documentElement.clientWidth, timer = 0;
window.addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (document.documentElement.clientWidth === drawnWidth) return;
    drawnWidth = document.documentElement.clientWidth;
    draw();
  }, 100);
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
