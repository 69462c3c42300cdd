package pods

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/svc"
)

// A set's program in a directory that its Pods do not see is named by its content, and a hidden working directory is left; what
// cannot work is an error before anything is created. Programs elsewhere stay as they are.
func TestRevealOfHiddenPrograms(t *testing.T) {
	home := t.TempDir() // below /tmp
	program := filepath.Join(home, "server")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	sum, err := fileio.HashExecutable(program, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	reveal := func(workDir string, given bool, command ...string) (*corev1.Pod, string, error) {
		var progress bytes.Buffer
		r := &runCommand{Global: &base.Global{Streams: base.Streams{Err: &progress}}, asSet: true, workDirGiven: given}
		r.command, r.workDir = command, workDir
		pod, err := r.pod()
		if err != nil {
			t.Fatal(err)
		}
		err = r.reveal(t.Context(), nil, "", pod)
		return pod, progress.String(), err
	}
	pod, said, err := reveal(home, false, "./server", program)
	c := pod.Spec.Containers[0]
	if err != nil || pod.Annotations[svc.ProgramsAnnotation] != sum+"  "+program || c.Command[0] != program || c.WorkingDir != "/" {
		t.Errorf("a hidden program: %v, %v, %v in %s", err, pod.Annotations, c.Command, c.WorkingDir)
	}
	if !strings.Contains(said, "the working directory is /") || !strings.Contains(said, "warning: the Pods do not see "+program) {
		t.Errorf("it printed %q", said)
	}
	pod, said, err = reveal("/", false, "/bin/sh", "-c", "true")
	if err != nil || len(pod.Annotations) > 0 || said != "" {
		t.Errorf("a program that Pods see: %v, %v, %q", err, pod.Annotations, said)
	}
	for name, want := range map[string]string{"missing": "is hidden from Pods that are not privileged", ".": "cannot be shown to them"} {
		if _, _, err := reveal("/", false, filepath.Join(home, name)+"/x"); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "/usr/local/bin") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := reveal(home, true, "/bin/sh"); err == nil || !strings.Contains(err.Error(), "--workdir: "+home+" is hidden") {
		t.Errorf("a hidden --workdir: %v", err)
	}
}
