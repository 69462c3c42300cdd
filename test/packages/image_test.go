package packages

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// makeImage writes the container image of a program, and returns its archive.
func makeImage(t *testing.T, program string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("../../tools/release/container", dir, "amd64="+program)
	cmd.Env = append(os.Environ(), "VERSION=v1.0.0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "fairlead-1.0.0-image.tar")
}

// The same program gives the same bytes.
func TestImageIsReproducible(t *testing.T) {
	a, err1 := os.ReadFile(makeImage(t, process.Program("backend")))
	b, err2 := os.ReadFile(makeImage(t, process.Program("backend")))
	if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
		t.Errorf("the archives differ: %v, %v", err1, err2)
	}
}

// containerd loads the image as make image writes it and runs it without write access.
func TestImageRuns(t *testing.T) {
	for _, tool := range []string{"containerd", "ctr", "runc"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%v (Debian: containerd, runc)", err)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("containerd needs root")
	}
	ctr := startContainerd(t)
	image := makeImage(t, process.Program("fairlead"))
	if out, err := ctr("images", "import", "--snapshotter", "native", image); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const name = "docker.io/fairlead/fairlead:1.0.0"
	out, err := ctr("run", "--rm", "--snapshotter", "native", "--read-only", "--net-host", name, "fairlead", "/usr/bin/fairlead", "version")
	if err != nil || !strings.HasPrefix(out, "fairlead ") {
		t.Errorf("%v\n%s", err, out)
	}
}

// startContainerd starts a containerd with state of its own until the test ends, and returns its client.
func startContainerd(t *testing.T) (ctr func(args ...string) (string, error)) {
	t.Helper()
	dir, err := os.MkdirTemp("", "c") // paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\n  address = %q\n",
		dir+"/root", dir+"/state", dir+"/sock")
	if err := os.WriteFile(dir+"/config.toml", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("containerd", "--config", dir+"/config.toml")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	wait, err := process.Launch(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	ctr = func(args ...string) (string, error) {
		cmd := exec.Command("ctr", append([]string{"--address", dir + "/sock", "--timeout", "2m"}, args...)...)
		cmd.WaitDelay = time.Second
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	testbed.Until(t, "containerd", func() error {
		_, err := ctr("version")
		return err
	})
	return ctr
}
