package runner_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/svc"
)

// A confined Pod gets a copy of a program in a directory that it does not see if it knows the program's content, and nothing else
// of that directory. All other files are missing in the same way.
func TestProgramsInHiddenDirectories(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	for _, base := range []string{"/root", os.TempDir()} {
		home, err := os.MkdirTemp(base, "clone-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(home) })
		c.checkPrograms(t, home)
	}
}

func (c *cluster) checkPrograms(t *testing.T, home string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(home, name) }
	script := []byte("#!/bin/sh\nexec 2>&1\necho ran; ls -a " + home + "; echo x >> " + at("bin/program") + "; cat " + at("secret") + "\n")
	if err := errors.Join(
		os.Mkdir(at("bin"), 0o700), os.WriteFile(at("bin/program"), script, 0o700),
		os.WriteFile(at("other"), []byte("#!/bin/sh\n"), 0o755), os.WriteFile(at("secret"), []byte("#!/bin/sh\necho secret\n"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	sum, err := fileio.HashExecutable(at("bin/program"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	run := func(command, dir string, programs ...podspec.Program) string {
		return c.outcome(c.attack("baseline", func(p *corev1.Pod) {
			p.Spec.Containers[0].Command, p.Spec.Containers[0].WorkingDir = []string{command}, dir
			lines := ""
			for _, f := range programs {
				lines += f.Line() + "\n"
			}
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, svc.ProgramsAnnotation, lines)
		}))
	}
	program := podspec.Program{Path: at("bin/program"), SHA256: sum}
	out := run(program.Path, "", program)
	if !regexp.MustCompile(`^ran\n\.\n\.\.\nbin\n`).MatchString(out) || strings.Contains(out, "echo secret") ||
		!strings.Contains(out, "Read-only file system") && !strings.Contains(out, "Permission denied") {
		t.Errorf("the program printed %q", out)
	}
	const hidden = "is hidden from Pods that are not privileged"
	if out := run(program.Path, ""); !strings.Contains(out, "command "+program.Path+" "+hidden) {
		t.Errorf("without its content: %q", out)
	}
	if out := run("/bin/true", at("bin")); !strings.Contains(out, "working directory "+at("bin")+" "+hidden) {
		t.Errorf("a hidden working directory: %q", out)
	}
	// The content of secret is known, and it is not executable; other has other content; the last is missing.
	var said []string
	for name, sum := range map[string]string{"secret": hashOf(t, at("secret")), "other": sum, "missing": sum} {
		out := run(at(name), "", podspec.Program{Path: at(name), SHA256: sum})
		said = append(said, strings.ReplaceAll(out, at(name), "PROGRAM"))
	}
	for _, s := range said {
		if s != said[0] || !strings.Contains(s, "no executable file") {
			t.Errorf("files that are not shown are told apart: %q", said)
		}
	}
	// The state of the agent is not for any Pod, whatever it knows.
	key := filepath.Join(filepath.Dir(c.state), "pki.sh")
	if err := os.WriteFile(key, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out := run(key, "", podspec.Program{Path: key, SHA256: hashOf(t, key)}); !strings.Contains(out, hidden) {
		t.Errorf("a file of the agent: %q", out)
	}
}

// hashOf is the SHA-256 of any file.
func hashOf(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(copied, b, 0o700); err != nil {
		t.Fatal(err)
	}
	sum, err := fileio.HashExecutable(copied, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
