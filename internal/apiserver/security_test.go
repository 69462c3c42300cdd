package apiserver_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// The commands of docs/security.md print what stands below them.
func TestSecurityDocument(t *testing.T) {
	t.Parallel()
	program := kubectl(t)
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)<!-- run by internal/apiserver/security_test.go -->\n```console\n(.*?)```").FindSubmatch(text)
	if block == nil {
		t.Fatal("docs/security.md has no marked block")
	}
	s, home := apiservertest.StartServer(t), t.TempDir()
	out, command, ran := "", "", 0
	for line := range strings.Lines(string(block[1])) {
		line = strings.TrimSuffix(line, "\n")
		next, ok := strings.CutPrefix(line, "$ kubectl ")
		if !ok {
			if !strings.Contains(out, line) {
				t.Errorf("%s printed %q, want %q", command, out, line)
			}
			continue
		}
		command = next
		cmd := exec.CommandContext(t.Context(), program, strings.Fields(command)...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+s.Kubeconfig(), "HOME="+home)
		printed, err := cmd.CombinedOutput()
		// can-i ends with 1 when the answer is no.
		if out = string(printed); err != nil && !strings.HasSuffix(out, "no\n") {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
		ran++
	}
	if ran < 5 {
		t.Errorf("only %d commands were run", ran)
	}
}
