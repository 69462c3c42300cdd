package cli

import (
	"encoding/json"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/preflight"
)

// A port in use makes 'fairlead check' fail, with a report that programs can read.
func TestCheck(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, as the command does")
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
	if code, _, stderr := call(t, "check", "--mode", "none"); code != exitUsage {
		t.Errorf("exit code %d, %s; want that of usage", code, stderr)
	}
}

func TestVersion(t *testing.T) {
	code, out, _ := call(t, "version", "-o", "json")
	var info versionInfo
	if err := json.Unmarshal([]byte(out), &info); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s", code, err, out)
	}
	if info.Version != version || !strings.HasPrefix(info.Kubernetes, "v1.") || !strings.HasPrefix(info.Platform, "linux/") {
		t.Errorf("%+v", info)
	}
	if _, out, _ := call(t, "version"); out != "fairlead "+version+"\n" {
		t.Errorf("printed %q", out)
	}
}
