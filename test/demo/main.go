// Command demo shows the way of a Service on one machine: two nodes and an
// outside client, each its own network namespace, three real backends, and
// what a client meets when it connects through the virtual IP, the DNS names and
// the node port, while backends become unready, die and go. Every line is
// measured; a wrong result ends it with exit code 1. It uses the real kubectl,
// curl and fairlead binaries, and no packet leaves its namespaces.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

const inside = "FAIRLEAD_DEMO_INSIDE"

func main() {
	bin := flag.String("bin", "bin", "directory of the fairlead, backend and kubectl binaries")
	manifest := flag.String("manifest", "examples/my-service.yaml", "the Service to apply")
	keep := flag.Bool("verbose", false, "show the logs of the server and the agents")
	flag.Parse()
	if flag.Arg(0) == "observe" {
		os.Exit(observe(flag.Args()[1:]))
	}
	if os.Getenv(inside) == "" {
		os.Exit(reexec())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	if err := demo(ctx, *bin, *manifest, *keep); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// reexec runs this program again in network and mount its own namespaces, so
// that nothing it does is seen by the machine; without root, as root of a user
// namespace.
func reexec() int {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	cmd.SysProcAttr = attr
	// The terminal's interrupt reaches the child by itself.
	signal.Ignore(os.Interrupt)
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintf(os.Stderr, "demo: no namespaces of its own: %s (are user namespaces switched off? then run it as root)\n", err)
		}
		return 1
	}
	return 0
}

func demo(ctx context.Context, bin, manifest string, verbose bool) (err error) {
	bin, err = filepath.Abs(bin)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "fairlead-demo-")
	if err != nil {
		return err
	}
	s := &stage{ctx: ctx, bin: bin, dir: dir, manifest: manifest, verbose: verbose}
	defer func() {
		if stopped := s.close(); err == nil {
			err = stopped
		}
		if err == nil {
			err = os.RemoveAll(dir)
		} else {
			err = fmt.Errorf("%w (logs are in %s)", err, dir)
		}
	}()
	begin := time.Now()
	for _, step := range []func() error{
		s.network, s.start, s.apply, s.backends,
		s.clusterIP, s.names, s.nodePort, s.unready, s.killed, s.allGone,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	fmt.Printf("\nall as it should be, in %s\n", time.Since(begin).Round(100*time.Millisecond))
	return nil
}
