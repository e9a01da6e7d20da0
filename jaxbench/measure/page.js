// What every page of charts needs: the theme's colours, and a chart's layout in them.
const shade = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function themed(figure) {
  const layout = structuredClone(figure.layout), text = shade('--text'), grid = shade('--grid');
  Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, -apple-system, Segoe UI, sans-serif', size: 13, color: text},
    hoverlabel: {font: {size: 13}}});
  for (const axis of ['xaxis', 'yaxis'])
    Object.assign(layout[axis], {gridcolor: grid, linecolor: grid, zerolinecolor: grid, fixedrange: true});
  if (figure.line) layout.shapes = [{type: 'line', xref: 'x', yref: 'paper', x0: figure.line, x1: figure.line, y0: 0,
    y1: 1, layer: 'below', line: {color: shade('--soft'), width: 1.5, dash: 'dot'}}];
  return layout;
}
