package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// block is commands of a page. Those of a marked one are run, in the namespace of 'fairlead up' if inside.
type block struct {
	commands       []string
	marked, inside bool
}

var (
	consoles = regexp.MustCompile("(?ms)^(?:<!-- ([^\n]*) -->\n)?```console\n(.*?)^```")
	marks    = []string{"run by test/readme_test.go", "run by test/readme_test.go, inside"}
)

// blocks returns the blocks of a page, of which n are marked.
func blocks(t *testing.T, page string, n int) (out []block) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range consoles.FindAllStringSubmatch(string(text), -1) {
		b := block{inside: found[1] == marks[1], marked: slices.Contains(marks, found[1])}
		for l := range strings.Lines(found[2]) {
			command, ok := strings.CutPrefix(l, "$ ")
			if !ok && b.marked {
				t.Fatalf("%s: %q in a marked block is not a command", page, l)
			}
			if ok {
				b.commands = append(b.commands, command)
			}
		}
		out = append(out, b)
	}
	if k := len(marked(out)); k != n {
		t.Fatalf("%s has %d marked blocks, want %d", page, k, n)
	}
	return out
}

// marked returns the blocks that are run.
func marked(all []block) []block {
	return slices.DeleteFunc(slices.Clone(all), func(b block) bool { return !b.marked })
}

// The quick starts have the same commands in every language, and the first of the README are those that are run.
func TestQuickStarts(t *testing.T) {
	pages, err := filepath.Glob("../docs/quickstart/*.md")
	if err != nil || len(pages) != 5 {
		t.Fatalf("quick starts %v, %v; want five languages", pages, err)
	}
	english := blocks(t, "../docs/quickstart/en.md", 2)
	if len(english) != 3 {
		t.Errorf("the quick start has %d blocks, want one before those that are run", len(english))
	}
	for _, page := range pages {
		if got := blocks(t, page, 2); fmt.Sprint(got) != fmt.Sprint(english) {
			t.Errorf("%s has other commands than the English one:\n%v\n%v", page, got, english)
		}
	}
	if first := marked(blocks(t, "../README.md", 3))[:2]; fmt.Sprint(first) != fmt.Sprint(marked(english)) {
		t.Errorf("the README has other commands than the quick start:\n%v\n%v", first, marked(english))
	}
}

// The commands of the README (which are those of the quick starts), of docs/sets.md and of examples/connecting-applications that
// are marked so work as they stand, one after the other, in two terminals: what one block exports counts in those after it.
// A reader has a clone with bin/ as 'make build kubectl' leaves it, and 'fairlead up' in another terminal. Confined Pods do not see
// the clone, as where newcomers have theirs.
func TestReadme(t *testing.T) {
	u := newUser(t)
	if !mount.Hidden(filepath.Join(u.dir, "bin")) {
		t.Fatalf("confined Pods see %s: the commands must work where they do not", u.dir)
	}
	_, pid := u.up()
	// A copy, since another user cannot read a clone in the home directory of root.
	if err := errors.Join(os.Symlink(u.dir, filepath.Join(u.dir, "bin")),
		os.CopyFS(filepath.Join(u.dir, "examples"), os.DirFS("../examples"))); err != nil {
		t.Fatal(err)
	}
	exports := ""
	run := func(b block) string {
		t.Helper()
		start, commands := "set -e\nunset KUBECONFIG\n", strings.Join(b.commands, "")
		if b.inside { // a shell of nsenter has the environment of the terminal that starts it, and begins in the root directory
			return process.Output(t, u.in(pid, start+"cd "+u.dir+"\n"+exports+"cd /\n"+commands))
		}
		script := start + exports + commands
		for _, c := range b.commands {
			if strings.HasPrefix(c, "export ") {
				exports += c
			}
		}
		return process.Output(t, u.command("sh", "-c", script))
	}
	for _, page := range []struct {
		path string
		want []string // something that each block prints
	}{
		{"../README.md", []string{"my-service", "myapp", "deployment"}},
		{"../docs/sets.md", []string{"web", "deployment"}},
		{"../examples/connecting-applications/README.md", []string{
			"nginxsecret", "443/TCP", "Welcome! my-nginx", "443:30443/TCP", "Welcome! my-nginx", "192.0.2.100", "Welcome! my-nginx", "deleted",
		}},
	} {
		for i, b := range marked(blocks(t, page.path, len(page.want))) {
			out := run(b)
			if !strings.Contains(out, page.want[i]) {
				t.Errorf("%s: block %d printed %q, want something of %q", page.path, i, out, page.want[i])
			}
			t.Log(out)
		}
	}
}
