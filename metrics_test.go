package fairlead_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// docs/metrics.md lists every metric of the code with its type, and no other.
func TestMetricsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| ([a-z]+) \\|(.*)\\|$").FindAllSubmatch(text, -1) {
		name := string(m[1])
		if documented[name] != "" {
			t.Errorf("docs/metrics.md: %s is there twice", name)
		}
		documented[name] = string(m[2])
		if cells := strings.Split(string(m[3]), "|"); len(cells) != 3 || strings.TrimSpace(cells[2]) == "" {
			t.Errorf("docs/metrics.md: %s has not the cells name, type, labels, unit and meaning", name)
		}
	}
	found := metricsOfCode(t, "internal")
	if len(found) < 80 {
		t.Errorf("only %d metrics found in the code: the test does not look where they are", len(found))
	}
	for name, m := range found {
		switch kind := documented[name]; {
		case kind == "":
			t.Errorf("%s: %s is not in docs/metrics.md", m.at, name)
		case m.kind != "" && m.kind != kind:
			t.Errorf("%s: %s is a %s, in docs/metrics.md a %s", m.at, name, m.kind, kind)
		}
	}
	for name := range documented {
		if _, ok := found[name]; !ok {
			t.Errorf("docs/metrics.md: no metric of the code has the name %s", name)
		}
	}
}

// metric is one in the code. kind is empty where only its use shows it.
type metric struct {
	at   token.Position
	kind string
}

// metricsOfCode returns the metrics that the packages below dir define by the libraries of Prometheus and Kubernetes.
func metricsOfCode(t *testing.T, dir string) map[string]metric {
	t.Helper()
	found := map[string]metric{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		p := metricPackage{t: t, fset: token.NewFileSet(), found: found}
		files, err := filepath.Glob(filepath.Join(path, "*.go"))
		if err != nil {
			return err
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			p.parse(file, text)
		}
		p.collect()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// metricPackage finds the metrics of one package. A name is a literal, a constant, or a prefix and a parameter of a function,
// whose calls are followed; anything else is an error, so that no metric is missed.
type metricPackage struct {
	t     *testing.T
	fset  *token.FileSet
	files []*ast.File
	found map[string]metric
}

func (p *metricPackage) parse(path string, text []byte) {
	f, err := parser.ParseFile(p.fset, path, text, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	p.files = append(p.files, f)
}

var metricOpts = regexp.MustCompile(`^(Counter|Gauge|Histogram|Summary)Opts$`)

func (p *metricPackage) collect() {
	for _, f := range p.files {
		var stack []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				stack = stack[:len(stack)-1]
				return true
			}
			stack = append(stack, n)
			switch n := n.(type) {
			case *ast.CompositeLit:
				if m := metricOpts.FindStringSubmatch(selector(n.Type)); m != nil {
					p.options(n, strings.ToLower(m[1]), stack)
				}
			case *ast.CallExpr:
				if selector(n.Fun) == "NewDesc" && len(n.Args) == 4 {
					p.name(n.Args[0], "", stack)
				}
			}
			return true
		})
	}
}

// options finds the name in the options of a metric.
func (p *metricPackage) options(lit *ast.CompositeLit, kind string, stack []ast.Node) {
	for _, e := range lit.Elts {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			continue
		}
		switch key := fmt.Sprint(kv.Key); key {
		case "Name":
			p.name(kv.Value, kind, stack)
		case "Namespace", "Subsystem":
			p.t.Errorf("%s: %s of a metric: write the whole name, so that it can be found", p.fset.Position(kv.Pos()), key)
		}
	}
}

// name records the metrics whose name is e.
func (p *metricPackage) name(e ast.Expr, kind string, stack []ast.Node) {
	for _, n := range p.values(e, stack) {
		if n == "" {
			continue
		}
		if known, ok := p.found[n]; !ok || known.kind == "" {
			p.found[n] = metric{p.fset.Position(e.Pos()), kind}
		}
	}
}

// values returns what e, below the nodes of stack, may be.
func (p *metricPackage) values(e ast.Expr, stack []ast.Node) []string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil {
			return []string{s}
		}
	case *ast.BinaryExpr:
		var out []string
		for _, x := range p.values(e.X, stack) {
			for _, y := range p.values(e.Y, stack) {
				out = append(out, x+y)
			}
		}
		return out
	case *ast.CallExpr: // docs/metrics.md has the beginnings of names in another registry
		if called, ok := e.Fun.(*ast.SelectorExpr); ok && called.Sel.Name == "GetName" {
			return nil
		}
	case *ast.Ident:
		if v := constant(e.Name, stack); v != nil {
			return p.values(v, nil)
		}
		if function, at, scope := parameter(e.Name, stack); function != "" {
			return p.arguments(function, at, scope)
		}
	}
	p.t.Errorf("%s: the name of a metric is neither a literal nor a parameter", p.fset.Position(e.Pos()))
	return nil
}

// constant returns the value of a constant of the functions of stack.
func constant(name string, stack []ast.Node) (value ast.Expr) {
	for _, n := range stack {
		if _, ok := n.(*ast.File); ok {
			continue
		}
		ast.Inspect(n, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Values) == len(spec.Names) {
				for i, id := range spec.Names {
					if id.Name == name {
						value = spec.Values[i]
					}
				}
			}
			return value == nil
		})
	}
	return value
}

// parameter returns the function of stack that has a parameter of that name, the parameter's place, and for a function in a
// variable the declaration in which it can be called.
func parameter(name string, stack []ast.Node) (function string, at int, scope ast.Node) {
	for i, n := range slices.Backward(stack) {
		var typ *ast.FuncType
		switch n := n.(type) {
		case *ast.FuncDecl:
			typ, function = n.Type, n.Name.Name
		case *ast.FuncLit:
			if assign, ok := stack[i-1].(*ast.AssignStmt); ok {
				typ, function, scope = n.Type, selector(assign.Lhs[0]), stack[1]
			}
		}
		if typ == nil {
			continue
		}
		at = 0
		for _, field := range typ.Params.List {
			for _, id := range field.Names {
				if id.Name == name {
					return function, at, scope
				}
				at++
			}
		}
		scope = nil
	}
	return "", 0, nil
}

// arguments returns what the calls of a function in scope, or in all files of the package, pass at a place.
func (p *metricPackage) arguments(function string, at int, scope ast.Node) (out []string) {
	calls := func(in ast.Node, literals bool) {
		var stack []ast.Node
		ast.Inspect(in, func(n ast.Node) bool {
			if n == nil {
				stack = stack[:len(stack)-1]
				return true
			}
			stack = append(stack, n)
			call, ok := n.(*ast.CallExpr)
			if ok && selector(call.Fun) == function && len(call.Args) > at && namesMetric(call.Args[at], literals) {
				out = append(out, p.values(call.Args[at], stack)...)
			}
			return true
		})
	}
	if scope != nil {
		calls(scope, false)
	} else {
		for _, f := range p.files {
			calls(f, !usesPrometheus(f))
		}
	}
	if len(out) == 0 {
		p.t.Errorf("no call of %s with the name of a metric", function)
	}
	return out
}

// namesMetric reports whether an argument may be part of a metric's name: functions of one name may be of different types.
func namesMetric(e ast.Expr, literal bool) bool {
	lit, ok := e.(*ast.BasicLit)
	if !ok {
		_, ok = e.(*ast.Ident)
		return ok && !literal
	}
	return lit.Kind == token.STRING && regexp.MustCompile(`^"[a-z][a-z0-9_]*"$`).MatchString(lit.Value)
}

func usesPrometheus(f *ast.File) bool {
	return slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool {
		return strings.Contains(i.Path.Value, "prometheus") || strings.Contains(i.Path.Value, "component-base/metrics")
	})
}

// selector returns the last name of an expression.
func selector(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// The test above finds each form of a name, and complains of those that it cannot follow.
func TestMetricNamesAreFound(t *testing.T) {
	p := metricPackage{t: t, fset: token.NewFileSet(), found: map[string]metric{}}
	p.parse("x.go", []byte(`package x
import "github.com/prometheus/client_golang/prometheus"
type T struct{}
func f() {
	gauge := func(name, help string) { prometheus.NewGauge(prometheus.GaugeOpts{Name: "a_" + name, Help: help}) }
	gauge("one", "")
	gauge("two", "")
	const three = "three"
	T{}.send(1, three)
	T{}.count("four")
	prometheus.NewDesc("five", "", nil, nil)
}
func g() {
	gauge := func(name string) { prometheus.NewGauge(prometheus.GaugeOpts{Name: "b_" + name}) }
	gauge("six")
}
func (t T) count(name string) { t.send(2, name) }
func (t T) send(v int, name string) { prometheus.NewDesc(name, "", nil, nil) }
`))
	p.collect()
	want := map[string]string{"a_one": "gauge", "a_two": "gauge", "three": "", "four": "", "five": "", "b_six": "gauge"}
	for name, kind := range want {
		if m, ok := p.found[name]; !ok || m.kind != kind {
			t.Errorf("%s: found %v, kind %q; want %q", name, ok, m.kind, kind)
		}
	}
	if len(p.found) != len(want) {
		t.Errorf("found %v", p.found)
	}
}
