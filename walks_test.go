package fairlead_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// walks are the sections of docs/flow.md that list files, and the most files that each may need: a change must not lead through
// half of the repository.
var walks = map[string]int{"One endpoint changes": 22, "One Service is created": 17, "One question": 13, "One Pod": 22}

var (
	walkStep = regexp.MustCompile("(?m)^[0-9]+\\. `([^`]+)`(.*(?:\n   .*)*)")
	// jump is how a walk goes on where no call leads: a watch, a queue, another process.
	jump   = regexp.MustCompile(`\*by (?:a|the) [A-Za-z ]+\*`)
	beside = regexp.MustCompile("(?s)Beside the path.*?\n\n")
)

// TestWalks checks that the files of a walk are on one path: the code of an earlier file leads into each step that does not name
// what else leads there, and the section names each file through which the path goes, as a step or beside the path.
func TestWalks(t *testing.T) {
	text, err := os.ReadFile("docs/flow.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, s := range strings.Split(string(text), "\n### ")[1:] {
		title, body, _ := strings.Cut(s, "\n")
		sections[title] = body
	}
	calls := loadCalls(t)
	for title, most := range walks {
		var files []string
		jumps := map[string]bool{}
		for _, m := range walkStep.FindAllStringSubmatch(sections[title], -1) {
			files = append(files, m[1])
			jumps[m[1]] = jump.MatchString(m[2])
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("docs/flow.md, %s: %v", title, err)
			}
		}
		if len(files) < 5 || len(files) > most {
			t.Errorf("docs/flow.md, %s: %d files, want 5 to %d", title, len(files), most)
		}
		calls.check(t, title, files, jumps, beside.FindString(sections[title]+"\n\n"))
	}
}

// callGraph has the functions of this module that others use, by the file in which they are declared. A use of an interface's
// method is a use of each method of that name and signature.
type callGraph struct {
	// uses has, for a function, the functions that its body mentions.
	uses map[string]map[string]bool
	// file is where a function is declared, relative to the repository.
	file map[string]string
}

// check reports files of a walk that no earlier one leads into, and files between two of them that the section does not name.
func (g *callGraph) check(t *testing.T, title string, files []string, jumps map[string]bool, aside string) {
	t.Helper()
	place := map[string]int{}
	for i, f := range files {
		place[f] = i + 1
	}
	reached := map[string]bool{files[0]: true}
	bridges := map[string][]string{}
	for f, uses := range g.uses {
		from := place[g.file[f]]
		if from == 0 {
			continue
		}
		for u := range uses {
			to := g.file[u]
			if place[to] > from {
				reached[to] = true
			}
			if place[to] != 0 || to == "" {
				continue
			}
			for v := range g.uses[u] {
				if p := place[g.file[v]]; p > from {
					bridges[to] = append(bridges[to], fmt.Sprintf("%s > %s > %s", f, u, v))
				}
			}
		}
	}
	for _, f := range files {
		if reached[f] == jumps[f] {
			t.Errorf("docs/flow.md, %s: a call of an earlier step leads into %s: %t; the step names another way: %t", title, f, reached[f], jumps[f])
		}
	}
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(aside, -1) {
		if bridges[m[1]] == nil {
			t.Errorf("docs/flow.md, %s: %s is not beside the path", title, m[1])
		}
		delete(bridges, m[1])
	}
	for _, f := range slices.Sorted(maps.Keys(bridges)) {
		slices.Sort(bridges[f])
		t.Errorf("docs/flow.md, %s: the path goes through %s, which is not in the list:\n\t%s", title, f, strings.Join(bridges[f], "\n\t"))
	}
}

// loadCalls reads all packages below internal that are not tests. What they import is read from the compiler's export data.
func loadCalls(t *testing.T) *callGraph {
	t.Helper()
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Export,Dir,GoFiles", "./internal/...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	exports := map[string]string{}
	g := &callGraph{uses: map[string]map[string]bool{}, file: map[string]string{}}
	fset := token.NewFileSet()
	own := map[string]*types.Package{}
	foreign := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	imports := importerFunc(func(path string) (*types.Package, error) {
		if p := own[path]; p != nil {
			return p, nil
		}
		return foreign.Import(path)
	})
	methods := map[string][]string{} // by name and signature
	abstract := map[string]string{}  // an interface's method: its name and signature
	for in := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Export, Dir string
			GoFiles                 []string
		}
		if err := in.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if !strings.HasPrefix(p.ImportPath, module) || strings.Contains(p.ImportPath, "/openapi") {
			continue
		}
		var files []*ast.File
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
		pkg, err := (&types.Config{Importer: imports}).Check(p.ImportPath, fset, files, info)
		if err != nil {
			t.Fatal(err)
		}
		own[p.ImportPath] = pkg
		for _, f := range files {
			path, err := filepath.Rel(root, fset.Position(f.Pos()).Filename)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || fn.Body == nil {
					continue
				}
				obj := info.Defs[fn.Name].(*types.Func)
				name := obj.FullName()
				g.file[name] = filepath.ToSlash(path)
				if fn.Recv != nil {
					methods[signature(obj)] = append(methods[signature(obj)], name)
				}
				uses := map[string]bool{}
				ast.Inspect(fn.Body, func(n ast.Node) bool {
					id, ok := n.(*ast.Ident)
					if !ok {
						return true
					}
					used, ok := info.Uses[id].(*types.Func)
					if !ok {
						return true
					}
					used = used.Origin()
					uses[used.FullName()] = true
					if r := used.Signature().Recv(); r != nil && types.IsInterface(r.Type()) && used.Pkg() != nil && own[used.Pkg().Path()] != nil {
						abstract[used.FullName()] = signature(used)
					}
					return true
				})
				g.uses[name] = uses
			}
		}
	}
	for _, uses := range g.uses {
		for u := range maps.Clone(uses) {
			for _, m := range methods[abstract[u]] {
				uses[m] = true
			}
		}
	}
	return g
}

// signature returns a method's name and the types of its parameters and results.
func signature(f *types.Func) string {
	s := f.Signature()
	return f.Name() + types.TypeString(types.NewSignatureType(nil, nil, nil, s.Params(), s.Results(), s.Variadic()), nil)
}

type importerFunc func(path string) (*types.Package, error)

func (f importerFunc) Import(path string) (*types.Package, error) { return f(path) }
