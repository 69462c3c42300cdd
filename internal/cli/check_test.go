package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/preflight"
)

// A port in use makes 'fairlead check' fail, with a report that programs can read.
func TestCheck(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the command reads tables of the kernel; make test as root runs it")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	code, out, stderr := call(t, "check", "-o", "json", "--data-dir", t.TempDir(), "--metrics-bind-address", l.Addr().String())
	var findings []preflight.Finding
	if err := json.Unmarshal([]byte(out), &findings); err != nil {
		t.Fatalf("%v: %s, %s", err, out, stderr)
	}
	if code != exitFailed || !strings.Contains(out, "tcp "+l.Addr().String()+" is in use") ||
		!strings.Contains(out, "--metrics-bind-address") {
		t.Errorf("exit code %d, %s, %s", code, out, stderr)
	}
	// What the agent's section of the configuration file has counts, unless a flag tells otherwise.
	config := writeConfig(t, "agent:\n  encrypt: true\n  server: https://192.0.2.1:6443\n  token-file: /nowhere\n"+
		"  metrics-bind-address: "+l.Addr().String()+"\n")
	for encrypt, flags := range map[bool][]string{true: nil, false: {"--encrypt=false"}} {
		_, out, stderr := call(t, append([]string{"check", "-o", "json", "--config", config, "--data-dir", t.TempDir()}, flags...)...)
		var findings []preflight.Finding
		if err := json.Unmarshal([]byte(out), &findings); err != nil {
			t.Fatalf("%v: %s, %s", err, out, stderr)
		}
		looked := slices.ContainsFunc(findings, func(f preflight.Finding) bool { return f.Check == "encryption" })
		if looked != encrypt || !strings.Contains(out, "tcp "+l.Addr().String()+" is in use") {
			t.Errorf("encrypt %v: %s", encrypt, out)
		}
	}
	if code, _, stderr := call(t, "check", "--mode", "none"); code != exitUsage {
		t.Errorf("exit code %d, %s; want that of usage", code, stderr)
	}
}

// An iptables that hangs keeps an agent's look at its machine neither from ending nor from the
// log; one that is being stopped logs nothing.
func TestWarnOfMachineIsBounded(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		for _, verb := range []string{"-save", "-restore"} {
			file := filepath.Join(dir, name+verb)
			if err := os.WriteFile(file, []byte("#!/bin/sh\nexec sleep 300\n"), 0o755); err != nil { //nolint:gosec // a program
				t.Fatal(err)
			}
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	const hangs = "cannot look for the rules of other programs"
	look := func(ctx context.Context, limit time.Duration) string {
		var log bytes.Buffer
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			node.WarnOfMachine(ctx, slog.New(slog.NewTextHandler(&log, nil)), preflight.Machine{}, limit)
		}()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("it still looks at the machine after a minute")
		}
		return log.String()
	}
	if log := look(t.Context(), 200*time.Millisecond); !strings.Contains(log, hangs) {
		t.Errorf("logged %s", log)
	}
	stopped, stop := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, stop)
	if log := look(stopped, time.Hour); log != "" {
		t.Errorf("an agent that is being stopped logged %s", log)
	}
}

func TestVersion(t *testing.T) {
	code, out, _ := call(t, "version", "-o", "json")
	var info versionInfo
	if err := json.Unmarshal([]byte(out), &info); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s", code, err, out)
	}
	if info.Version != base.Version || !strings.HasPrefix(info.Kubernetes, "v1.") || !strings.HasPrefix(info.Platform, "linux/") {
		t.Errorf("%+v", info)
	}
	if _, out, _ := call(t, "version"); out != "fairlead "+base.Version+"\n" {
		t.Errorf("printed %q", out)
	}
}
