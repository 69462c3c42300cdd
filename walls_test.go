package fairlead_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The limits of a package and of a type below internal/. A package or a type
// above them has more than one subject.
const (
	maxFiles   = 20
	maxLines   = 4000
	maxMethods = 30
)

var generatedCode = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// walls is what a directory holds in hand-written files that are not tests.
type walls struct {
	files, lines int
	// methods counts methods by the name of their type.
	methods map[string]int
}

func TestPackagesAndTypesAreSmall(t *testing.T) {
	packages := map[string]*walls{}
	err := filepath.WalkDir("internal", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == filepath.FromSlash("internal/apiserver/openapi") || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || generatedCode.Match(text) {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(filepath.Dir(path))
		p := packages[dir]
		if p == nil {
			p = &walls{methods: map[string]int{}}
			packages[dir] = p
		}
		p.files++
		p.lines += bytes.Count(text, []byte("\n"))
		countMethods(f, p.methods)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(packages) < 50 {
		t.Fatalf("only %d packages seen: the walk does not look where the code is", len(packages))
	}
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		p := packages[dir]
		if p.files > maxFiles || p.lines > maxLines {
			t.Errorf("%s has %d files and %d lines, the limits are %d and %d: divide it by subject",
				dir, p.files, p.lines, maxFiles, maxLines)
		}
		for _, name := range slices.Sorted(maps.Keys(p.methods)) {
			if n := p.methods[name]; n > maxMethods {
				t.Errorf("%s: type %s has %d methods, the limit is %d: divide it by subject", dir, name, n, maxMethods)
			}
		}
	}
}

// countMethods adds the methods that f declares to those of their types.
func countMethods(f *ast.File, methods map[string]int) {
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv == nil {
			continue
		}
		if name := receiverType(fn.Recv.List[0].Type); name != "" {
			methods[name]++
		}
	}
}

// receiverType returns the name of the type of a receiver, which may be a
// pointer and have type parameters.
func receiverType(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiverType(e.X)
	case *ast.IndexExpr:
		return receiverType(e.X)
	case *ast.IndexListExpr:
		return receiverType(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
