package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// Wrong flags of register are one line with the flag, and no request; a dry run needs no
// server.
func TestRegisterFlags(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nonexistent")
	for want, args := range map[string]string{
		"which program?":                        "-p 80",
		"--port: on which port":                 "--name a",
		"--port: \"x\": want [NAME=]PORT":       "--name a -p x",
		"--ready-timeout: \"0s\": want whole":   "--name a -p 80 --ready-timeout 0s",
		"--pid-file: \"x\": want an absolute":   "--name a -p 80 --pid-file x",
		"--address: \"::1\": other nodes":       "--name a -p 80 --address ::1",
		"--ready: \"80\": want http":            "--name a -p 80 --ready 80",
		"--labels \"a\"":                        "--name a -p 80 -l a",
		"--unit: \"a b.service\": want":         "--name a -p 80 --unit a\x00b",
		"--name and --file: the file sets it":   "--name a -f x.yaml",
		"--output is for --dry-run":             "--name a -p 80 -o yaml",
		"--install-hook is for a --unit":        "--name a -p 80 --install-hook",
		"--name: \"A\": a lowercase RFC 1123":   "--name A -p 80",
		"which program? for example: fairlead ": "",
	} {
		var out, err bytes.Buffer
		line := append([]string{"register"}, strings.Fields(args)...)
		if args == "" {
			line = []string{"deregister"}
		}
		for i := range line {
			line[i] = strings.ReplaceAll(line[i], "\x00", " ")
		}
		code := run(t.Context(), line, base.Streams{In: strings.NewReader(""), Out: &out, Err: &err})
		if code != exitUsage || !strings.HasPrefix(err.String(), "fairlead: "+want) {
			t.Errorf("%q: exit code %d, %q, want %d and %q", args, code, err.String(), exitUsage, want)
		}
	}
	var out, err bytes.Buffer
	code := run(t.Context(), strings.Fields("register --dry-run --name a -p web=80 --unit b --node n -n shop -l app=a"),
		base.Streams{In: strings.NewReader(""), Out: &out, Err: &err})
	for _, want := range []string{"kind: Pod", "name: a-n", "namespace: shop", "fairlead.dev/unit: b.service", "hostNetwork: true", "app: a"} {
		if code != exitDone || !strings.Contains(out.String(), want) {
			t.Errorf("exit code %d, %s: %s\nwant %q", code, err.String(), out.String(), want)
		}
	}
}
