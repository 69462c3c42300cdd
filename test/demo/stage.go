package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The hosts of the demo: each has 192.168.70.N on one switch.
var hosts = map[string]string{"node1": "192.168.70.11", "node2": "192.168.70.12", "client": "192.168.70.20"}

// gateway is every host's way to the rest of the world. It forwards nothing, but
// without a default route a host would refuse to send to a ClusterIP at all.
const gateway = "192.168.70.1"

// stage is the running demo: its hosts and processes.
type stage struct {
	ctx                context.Context
	bin, dir, manifest string
	verbose            bool
	daemons            []*daemon
	clusterAddr        string
	port               string
}

// daemon is a long-running process; ended gets its end, once.
type daemon struct {
	*exec.Cmd
	name  string
	ended chan error
}

var errEnded = errors.New("it should run until the demo ends")

// line prints one result.
func line(what, format string, args ...any) {
	fmt.Printf("%-44s %s\n", what, fmt.Sprintf(format, args...))
}

// output runs a command within two minutes and returns what it wrote; its errors
// carry its own words.
func (s *stage) output(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = s.env()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), err
}

func (s *stage) env() []string {
	return append(os.Environ(), "KUBECONFIG="+filepath.Join(s.dir, "server", "admin.kubeconfig"), "HOME="+s.dir)
}

// on runs a command on a host.
func (s *stage) on(host, name string, args ...string) (string, error) {
	return s.output("ip", append([]string{"netns", "exec", host, name}, args...)...)
}

func (s *stage) kubectl(args ...string) (string, error) {
	return s.on("node1", filepath.Join(s.bin, "kubectl"), args...)
}

// network makes the hosts and the switch between them.
func (s *stage) network() error {
	// ip-netns keeps its names below /run, which here is a private one.
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := syscall.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount a private /run: %w", err)
	}
	script := []string{
		"link set lo up",
		"link add switch type bridge",
		"addr add " + gateway + "/24 dev switch",
		"link set switch up",
	}
	for host, addr := range hosts {
		script = append(script,
			"netns add "+host,
			fmt.Sprintf("link add p-%s type veth peer name eth0 netns %s", host, host),
			fmt.Sprintf("link set p-%s master switch up", host),
			fmt.Sprintf("-n %s link set lo up", host),
			fmt.Sprintf("-n %s addr add %s/24 dev eth0", host, addr),
			fmt.Sprintf("-n %s link set eth0 up", host),
			fmt.Sprintf("-n %s route add default via %s", host, gateway),
		)
	}
	for _, l := range script {
		if _, err := s.output("ip", strings.Fields(l)...); err != nil {
			return err
		}
	}
	return nil
}

// spawn starts a long-running command on a host, its log in a file.
func (s *stage) spawn(log, host, name string, args ...string) error {
	cmd := exec.Command("ip", append([]string{"netns", "exec", host, name}, args...)...)
	cmd.Env = s.env()
	file, err := os.Create(filepath.Join(s.dir, log+".log"))
	if err != nil {
		return err
	}
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	if s.verbose {
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	d := &daemon{Cmd: cmd, name: log, ended: make(chan error, 1)}
	go func() { d.ended <- cmd.Wait() }()
	s.daemons = append(s.daemons, d)
	return nil
}

// start runs a server on node1 and an agent on both nodes, and waits until both
// are Ready.
func (s *stage) start() error {
	begin := time.Now()
	fairlead := filepath.Join(s.bin, "fairlead")
	data := filepath.Join(s.dir, "server")
	if err := s.spawn("server", "node1", fairlead, "server", "--data-dir", data,
		"--bind-address", "127.0.0.1,"+hosts["node1"]); err != nil {
		return err
	}
	token := filepath.Join(data, "node-token")
	if err := s.until("the server to start", 60*time.Second, func() error {
		_, err := s.kubectl("get", "--raw", "/readyz")
		return err
	}); err != nil {
		return err
	}
	line("API server ready", "after %s", since(begin))
	for _, node := range []string{"node1", "node2"} {
		if err := s.spawn("agent-"+node, node, fairlead, "agent", "--server", "https://"+hosts["node1"]+":6443",
			"--token-file", token, "--node-name", node, "--node-ip", hosts[node],
			"--data-dir", filepath.Join(s.dir, node)); err != nil {
			return err
		}
	}
	if err := s.until("both nodes to be Ready", 60*time.Second, func() error {
		out, err := s.kubectl("get", "nodes", "-o", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status} {end}`)
		if err == nil && strings.Count(out, "True") != 2 {
			err = fmt.Errorf("the Ready conditions are %q", out)
		}
		return err
	}); err != nil {
		return err
	}
	line("node1 and node2 Ready", "after %s", since(begin))
	return nil
}

// until polls check until it succeeds; the reason of the last failure is the
// error.
func (s *stage) until(what string, within time.Duration, check func() error) error {
	deadline := time.Now().Add(within)
	for {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) || s.ctx.Err() != nil {
			return fmt.Errorf("waited %s for %s: %w", within, what, err)
		}
		if err := s.alive(); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// alive says which daemon has ended.
func (s *stage) alive() error {
	for _, d := range s.daemons {
		select {
		case err := <-d.ended:
			d.ended <- err
			return fmt.Errorf("%s has ended early: %w", d.name, errors.Join(err, errEnded))
		default:
		}
	}
	return nil
}

// close ends the daemons as an administrator would, the agents first, and says
// if one does not end cleanly. Pods outlive an agent, so 'fairlead cleanup'
// ends them.
func (s *stage) close() error {
	var errs []error
	for _, d := range slices.Backward(s.daemons) {
		d.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-d.ended:
			if err != nil {
				errs = append(errs, fmt.Errorf("%s did not stop cleanly: %w", d.name, err))
			}
		case <-time.After(20 * time.Second):
			d.Process.Signal(syscall.SIGQUIT) // its goroutines go to the log
			errs = append(errs, fmt.Errorf("%s did not stop within 20 s: %w", d.name, <-d.ended))
		}
	}
	for _, node := range []string{"node1", "node2"} {
		if _, err := os.Stat(filepath.Join(s.dir, node)); err != nil {
			continue
		}
		if _, err := s.on(node, filepath.Join(s.bin, "fairlead"), "cleanup", "--data-dir", filepath.Join(s.dir, node)); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// podNames lists the ready backends.
func (s *stage) podNames() ([]string, error) {
	out, err := s.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].metadata.name}")
	return strings.Fields(out), err
}

// podIP is the address of a Pod.
func (s *stage) podIP(name string) (string, error) {
	out, err := s.kubectl("get", "pod", name, "-o", "jsonpath={.status.podIP}")
	if err == nil && net.ParseIP(out) == nil {
		err = fmt.Errorf("pod %s has no address, but %q", name, out)
	}
	return out, err
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Millisecond) }
