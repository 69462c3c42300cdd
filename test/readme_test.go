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

// The commands of the README that are marked so work as they stand, one after
// the other.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)<!-- run by test/readme_test.go(, inside)? -->\n```console\n(.*?)```")
	found := block.FindAllStringSubmatch(string(text), -1)
	if len(found) != 2 {
		t.Fatalf("the README has %d marked blocks, want 2", len(found))
	}
	u := newUser(t)
	_, pid := u.up()
	for name, target := range map[string]string{"bin": u.dir, "examples": mustAbs(t, "../examples")} {
		if err := os.Symlink(target, filepath.Join(u.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, b := range found {
		script := "set -e\nPATH=$PWD:$PATH\n"
		for l := range strings.Lines(b[2]) {
			command, ok := strings.CutPrefix(l, "$ ")
			if !ok {
				t.Fatalf("%q in a marked block is not a command", l)
			}
			script += command
		}
		var cmd *exec.Cmd
		if b[1] == "" {
			cmd = u.command("sh", "-c", script)
		} else {
			cmd = u.in(pid, script)
		}
		out := process.Output(t, cmd)
		if !strings.Contains(out, "my") {
			t.Errorf("the commands printed %q", out)
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
