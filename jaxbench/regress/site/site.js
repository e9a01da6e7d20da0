// Pages of a history. Data comes as scripts, which a page that was opened from a folder may load too.
const at = id => document.getElementById(id), BENCH = {points: {}, runs: {}, notes: {}, layers: []};
const text = (tag, words, name) => {
  const made = document.createElement(tag);
  made.textContent = words;
  if (name) made.className = name;
  return made;
};

function script(path) {  // loads once
  script.loaded ??= new Map();
  if (!script.loaded.has(path)) script.loaded.set(path, new Promise((done, failed) => {
    const made = document.createElement('script');
    made.src = path;
    made.onload = done;
    made.onerror = () => { script.loaded.delete(path); failed(new Error(`${path} cannot be read`)); };
    document.head.append(made);
  }));
  return script.loaded.get(path);
}

const drawn = new Map();  // id of a chart -> its data and layout, to be drawn again in another theme
async function draw(id, data, layout) {
  drawn.set(id, [data, layout]);
  await script('plotly.js');
  if (drawn.get(id)?.[0] !== data) return;  // another one was asked for meanwhile
  await Plotly.react(at(id), data, themed({layout: {xaxis: {}, yaxis: {}, ...layout}}), {displayModeBar: false,
    responsive: true});
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const [id, [data, layout]] of drawn) draw(id, data, layout);
});

const number = (value, unit) => {
  if (unit === 's') return value < 1 ? `${+(1e3 * value).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`;
  if (unit === 'bytes') return `${(value / 1e6).toFixed(1)} MB`;
  const [prefix, size] = [['T', 1e12], ['G', 1e9], ['M', 1e6]].find(([, size]) => Math.abs(value) >= size) ?? ['', 1];
  return `${+(value / size).toPrecision(4)} ${prefix}${unit === 'count' || unit === 'ratio' ? '' : unit}`.trim();
};

const plain = words => words.replace(/[&<>]/g, sign => ({'&': '&amp;', '<': '&lt;', '>': '&gt;'})[sign]);  // Plotly's texts are markup
const lines = words => (words.replace(/\s+/g, ' ').match(/.{1,76}(?: |$)|\S{76}/g) ?? []).map(plain);  // it breaks none by itself

const isByCommit = () => at('axis').getAttribute('aria-pressed') === 'true';
const LABEL = 84;  // pixels of a commit's label with the space beside it
function runAxis(points) {  // where runs stand, and the axis that says so
  if (!isByCommit()) return {x: points.time, xaxis: {type: 'date'}};
  const x = points.run.map((_, i) => i), room = Math.max(1, Math.floor((at('chart').clientWidth - 100) / LABEL));
  const step = Math.ceil(x.length / room), shown = x.filter(i => (x.length - 1 - i) % step === 0);
  const brief = commit => plain(commit.slice(0, 7)) + (commit.length > 7 && commit.includes('+') ? '+' : '');
  return {x, xaxis: {type: 'linear', tickmode: 'array', tickvals: shown, tickangle: 0,
    ticktext: shown.map(i => brief(points.commit[i])), title: {text: 'commits, a run each, the newest on the right'}}};
}

const noted = points => points.run.map((id, i) => ({i, ...BENCH.notes[id]})).filter(each => each.notes);
const saidOf = each => [each.tag && `tag ${each.tag}`, ...each.notes].filter(Boolean);
function noteList(points) {
  const found = noted(points).reverse(), list = document.createElement('ul'), made = document.createElement('details');
  for (const each of found.slice(0, 50)) list.append(text('li', `${points.time[each.i]} ${points.commit[each.i]}: ${saidOf(each).join('; ')}`));
  made.append(text('summary', `Tags and notes of ${found.length} runs${found.length > 50 ? ', the newest 50' : ''}`), list);
  made.open = at('notes').querySelector('details')?.open ?? false;
  return found.length ? [made] : [];
}

function trend(points, about) {  // a series' chart: data and layout
  const {x, xaxis} = runAxis(points), found = noted(points);
  const hover = points.run.map((run, i) => plain(points.commit[i]) + '<br>' + plain(run));
  const line = {type: 'scatter', mode: 'lines+markers', x, y: points.median, customdata: hover,
    hovertemplate: '%{y}<br>%{customdata}<extra></extra>', line: {color: shade('--link')}, name: 'median'};
  const band = name => ({type: 'scatter', mode: 'lines', x, hoverinfo: 'skip', line: {width: 0},
    y: points[name].map((value, i) => value ?? points.median[i]), connectgaps: true});
  const shapes = points.changes.map(([index]) => ({type: 'line', xref: 'x', yref: 'paper', x0: x[index],
    x1: x[index], y0: 0, y1: 1, line: {color: shade('--bad'), width: 1.5, dash: 'dot'}}));
  const data = [band('low'), {...band('high'), fill: 'tonexty', fillcolor: shade('--line') + '90'}, line];
  const yaxis = {title: {text: plain(about.unit)}, rangemode: at('scale').checked ? 'tozero' : 'normal'};
  const layout = {height: 420, showlegend: false, shapes, margin: {t: 20, r: 20}, xaxis, yaxis};
  if (!found.length) return [data, layout];
  const marks = {type: 'scatter', mode: 'markers', yaxis: 'y2', x: found.map(each => x[each.i]), y: found.map(() => 0), name: 'notes',
    marker: {size: 9, color: shade('--soft'), symbol: found.map(each => each.tag ? 'diamond' : 'triangle-up')},
    customdata: found.map(each => [hover[each.i], ...saidOf(each).flatMap(lines)].join('<br>')),
    hovertemplate: '%{customdata}<extra></extra>'};
  // a strip of their own, where no point of the series hides them
  const strip = {domain: [0, 0.06], range: [-1, 1], visible: false, fixedrange: true, anchor: 'x'};
  return [[...data, marks], {...layout, xaxis: {...xaxis, anchor: 'y2'}, yaxis: {...yaxis, domain: [0.07, 1]}, yaxis2: strip}];
}

async function trends() {
  await Promise.all([script('data/index.js'), script('data/notes.js')]);
  const asked = new URLSearchParams(location.hash.slice(1)), hosts = [...new Set(BENCH.series.map(each => each.host))];
  at('host').append(new Option('all', ''), ...hosts.map(host => new Option(host, host)));
  if (hosts.includes(asked.get('host'))) at('host').value = asked.get('host');
  const fill = () => {
    const words = at('filter').value.toLowerCase().split(/\s+/).filter(Boolean), before = at('series').value;
    const fitting = BENCH.series.filter(each => words.every(word => each.name.toLowerCase().includes(word))
      && (!at('host').value || each.host === at('host').value) && (!at('changed').checked || each.num_changes));
    at('series').replaceChildren(...fitting.map(each => new Option(
      `${each.name}  (${each.num_points} runs${each.num_changes ? `, changed ${each.num_changes} times` : ''}, ` +
      `${each.device} ${each.host}, case ${each.work})`, each.file)));
    if (fitting.some(each => each.file === before)) at('series').value = before;
    else if (fitting.length) at('series').value = fitting[0].file;
    show();
  };
  const show = async () => {
    const file = at('series').value, about = BENCH.series.find(each => each.file === file);
    if (!about) {
      at('about').textContent = 'No series fits.';
      for (const id of ['changes', 'notes']) at(id).replaceChildren();
      return;
    }
    await script(`data/series-${file}.js`);
    if (at('series').value !== file) return;
    const points = BENCH.points[file], list = document.createElement('ul');
    const better = about.higher_is_better === null ? '' : `, ${about.higher_is_better ? 'higher' : 'lower'} is better`;
    at('about').textContent = `${about.name}, ${about.unit || 'no unit'}${better}; ` +
      `${points.time.length} runs, the newest ${number(points.median.at(-1), about.unit)}.`;
    for (const [index, before, after] of points.changes)
      list.append(text('li', `${points.time[index]} ${points.commit[index]}: ${number(before, about.unit)} to ${number(after, about.unit)}`));
    at('changes').replaceChildren(...(points.changes.length ? [text('h3', 'Changes'), list] : []));
    at('notes').replaceChildren(...noteList(points));
    await draw('chart', ...trend(points, about));
  };
  const step = by => { at('series').selectedIndex = Math.max(0, Math.min(at('series').length - 1,
    at('series').selectedIndex + by)); show(); };
  const turn = () => { at('axis').setAttribute('aria-pressed', !isByCommit()); show(); };
  let waiting;
  for (const id of ['filter', 'host', 'changed']) at(id).addEventListener('input', fill);
  for (const id of ['series', 'scale']) at(id).addEventListener('change', show);
  at('axis').addEventListener('click', turn);
  addEventListener('resize', () => { clearTimeout(waiting); waiting = setTimeout(() => isByCommit() && show(), 200); });
  const keys = {'/': () => at('filter').focus(), j: () => step(1), k: () => step(-1), c: turn};
  document.addEventListener('keydown', event => {
    if (event.target.matches('input[type=search]') || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();  // a list would look for a series that begins with the letter
    keys[event.key]();
  });
  fill();
}

const ROW = {name: 0, verdict: 1, level: 2, worse: 3, low: 4, high: 5, base: 6, head: 7, interval: 8, said: 9, warning: 10, critical: 11};
function compare() {
  if (!at('run').length) return;
  const named = location.hash.slice(1);
  if ([...at('run').options].some(option => option.value === named)) at('run').value = named;
  const show = async () => {
    const id = at('run').value;
    await script(`data/run-${id}.js`);
    if (at('run').value !== id) return;
    const record = BENCH.runs[id], all = at('all').checked;
    const rows = record.rows.filter(row => all || row[ROW.verdict] !== 'no change');
    at('about').textContent = `${record.rows.length} series, ${record.rows.length - rows.length} that did not change are left out. ` +
      record.notes.join(' ');
    at('why').replaceChildren(...record.why.map(line => text('li', line)));
    const places = rows.filter(row => row[ROW.worse] !== null), y = places.map(row => plain(row[ROW.name]));
    const percent = value => 100 * value;
    const colour = row => shade({regression: '--bad', improvement: '--good'}[row[ROW.verdict]] ?? '--soft');
    const margin = (name, width) => ({type: 'scatter', mode: 'markers', x: places.map(row => percent(row[ROW[name]])), y,
      marker: {symbol: 'line-ns-open', size: 12, color: shade('--soft'), line: {width}}, name,
      hovertemplate: `${name} above %{x:.0f} %<extra></extra>`});
    const dots = {type: 'scatter', mode: 'markers', y, x: places.map(row => percent(row[ROW.worse])), name: 'head',
      marker: {color: places.map(colour), size: 9, symbol: places.map(row => row[ROW.low] === row[ROW.high] ? 'diamond' : 'circle')},
      error_x: {type: 'data', symmetric: false, color: shade('--soft'), thickness: 1.5,
        array: places.map(row => percent((row[ROW.high] ?? row[ROW.worse]) - row[ROW.worse])),
        arrayminus: places.map(row => percent(row[ROW.worse] - (row[ROW.low] ?? row[ROW.worse])))},
      text: places.map(row => row[ROW.said]), hovertemplate: '%{y}<br>%{x:.1f} %, %{text}<extra></extra>'};
    at('chart').hidden = !places.length;
    const zero = {type: 'line', xref: 'x', yref: 'paper', x0: 0, x1: 0, y0: 0, y1: 1, line: {color: shade('--text'), width: 1}};
    if (places.length) await draw('chart', [margin('warning', 1), margin('critical', 2.5), dots], {
      height: 120 + 24 * places.length, showlegend: false, margin: {l: 260, t: 30, r: 20}, shapes: [zero],
      xaxis: {title: {text: 'worse by, percent'}}, yaxis: {autorange: 'reversed', dtick: 1}});
    const table = document.createElement('table'), body = table.createTBody(), head = table.createTHead().insertRow();
    for (const name of ['series', 'base', 'head', `worse by, ${record.level} each`, 'verdict']) head.append(text('th', name));
    for (const row of rows) {
      const line = body.insertRow(), kind = {regression: 'slower', improvement: 'faster'}[row[ROW.verdict]] ?? '';
      for (const key of ['name', 'base', 'head', 'interval', 'said']) line.append(text('td', row[ROW[key]], key === 'said' ? `left ${kind}` : ''));
    }
    at('table').replaceChildren(table);
  };
  at('run').addEventListener('change', () => { history.replaceState(null, '', `#${at('run').value}`); show(); });
  at('all').addEventListener('change', show);
  show();
}

async function layers() {
  if (!at('layers-0')) return;
  await script('data/layers.js');
  BENCH.layers.forEach((figure, i) => draw(`layers-${i}`, figure.data, figure.layout));
}

const KEPT = 600;  // samples of a chart
function live() {
  if (!location.protocol.startsWith('http')) return;
  const samples = [], source = new EventSource('events');
  source.onerror = () => { at('about').textContent = 'The dashboard does not answer; it is tried again.'; };
  source.onmessage = message => {
    samples.push(JSON.parse(message.data));
    if (samples.length > KEPT) samples.shift();
    const last = samples.at(-1), x = samples.map(each => each.time_utc);
    at('about').textContent = `Machine ${last.host}, ${last.cores} cores, sampled at ${last.time_utc}.`;
    const tile = (figure, what, remark) => {
      const card = text('div', '', 'card');
      card.append(text('b', figure), text('span', what), text('small', remark));
      return card;
    };
    const gigabytes = value => `${(value / 1e9).toFixed(1)} GB`;
    at('tiles').replaceChildren(tile(`${last.cpu_percent.toFixed(0)} %`, 'processor', `load ${last.load.toFixed(2)}`),
      tile(gigabytes(last.memory_bytes), 'memory in use', `of ${gigabytes(last.memory_total_bytes)}`),
      ...last.devices.map(each => tile(`${each.utilisation_percent} %`, each.name, gigabytes(each.memory_bytes))),
      tile(last.watts === null ? 'not readable' : `${last.watts.toFixed(0)} W`, 'power', 'processor packages and GPUs'));
    const chart = (id, title, rows, extra = {}) => draw(id, rows.map(([name, y]) => ({type: 'scatter', mode: 'lines', x, y, name})),
      {height: 240, margin: {t: 34, b: 44}, title: {text: title, font: {size: 14}}, showlegend: rows.length > 1,
        yaxis: {rangemode: 'tozero', ...extra}});
    chart('cpu', 'processor, percent of all cores', [['processor', samples.map(each => each.cpu_percent)]], {range: [0, 100]});
    chart('memory', 'memory, GB', [['in use', samples.map(each => each.memory_bytes / 1e9)],
      ['of jaxbench', samples.map(each => each.own_bytes / 1e9)]]);
    at('device').hidden = !last.devices.length;
    if (last.devices.length) chart('device', 'devices, percent', last.devices.map((each, i) =>
      [each.name, samples.map(sample => sample.devices[i]?.utilisation_percent)]), {range: [0, 100]});
    at('power').hidden = last.watts === null;
    if (last.watts !== null) chart('power', 'power, watts', [['watts', samples.map(each => each.watts)]]);
    at('work').replaceChildren(...(last.work.length ? last.work.map(line => text('p', line)) : [text('p', 'None.', 'soft')]));
  };
}

({trends, compare, parity: layers, live})[document.body.dataset.page]?.();
