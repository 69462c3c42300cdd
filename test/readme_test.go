package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// block is commands of a page that are marked, in the namespace of 'fairlead up' if inside.
type block struct {
	commands []string
	inside   bool
}

// blocks returns the marked blocks of a page, of which there are n.
func blocks(t *testing.T, page string, n int) (out []block) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	marked := regexp.MustCompile("(?s)<!-- run by test/readme_test.go(, inside)? -->\n```console\n(.*?)```")
	for _, found := range marked.FindAllStringSubmatch(string(text), -1) {
		b := block{inside: found[1] != ""}
		for l := range strings.Lines(found[2]) {
			command, ok := strings.CutPrefix(l, "$ ")
			if !ok {
				t.Fatalf("%s: %q in a marked block is not a command", page, l)
			}
			b.commands = append(b.commands, command)
		}
		out = append(out, b)
	}
	if len(out) != n {
		t.Fatalf("%s has %d marked blocks, want %d", page, len(out), n)
	}
	return out
}

// The commands of the README and of docs/sets.md that are marked so work as they stand, one
// after the other.
func TestReadme(t *testing.T) {
	all := append(blocks(t, "../README.md", 3), blocks(t, "../docs/sets.md", 2)...)
	u := newUser(t)
	_, pid := u.up()
	for name, target := range map[string]string{"bin": u.dir, "examples": mustAbs(t, "../examples")} {
		if err := os.Symlink(target, filepath.Join(u.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	// The programs are in /tmp, and Pods of sets have one of their own (docs/sets.md).
	process.Output(t, u.command("kubectl", "label", "namespace", "default", "pod-security.kubernetes.io/enforce=privileged"))
	for i, b := range all {
		script := "set -e\nPATH=$PWD:$PATH\n" + strings.Join(b.commands, "")
		var cmd *exec.Cmd
		if b.inside {
			cmd = u.in(pid, script)
		} else {
			cmd = u.command("sh", "-c", script)
		}
		out := process.Output(t, cmd)
		if want := []string{"my-service", "myapp", "deployment", "web", "deployment"}[i]; !strings.Contains(out, want) {
			t.Errorf("block %d printed %q, want something of %q", i, out, want)
		}
		t.Log(out)
	}
}

func mustAbs(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}
