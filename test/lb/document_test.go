package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// machine is a host with its own name, and with own directories of the state of programs.
type machine struct {
	*testing.T
	host *testbed.Host
	pid  int
}

// newMachine makes a host of the network 192.0.2.0/24 on which the project's programs are installed.
func newMachine(t *testing.T, network *testbed.Network, name string, addr string) *machine {
	t.Helper()
	m := &machine{T: t, host: network.Outside(name)}
	process.Output(t, m.host.Command(t.Context(), "ip", "address", "add", addr+"/24", "dev", "eth0"))
	m.host.Sysctl("net/ipv4/ip_forward", "1")
	cmd := m.host.Command(context.Background(), "unshare", "--mount", "--uts", "sh", "-ec",
		`hostname "$1"; mount -t tmpfs state /var/lib; mount -t tmpfs run /run; mount --bind "$2" /usr/local/bin; echo; exec sleep infinity`,
		"sh", name, filepath.Dir(process.Program("fairlead")))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("cannot prepare %s: %v", name, err)
	}
	m.pid = cmd.Process.Pid
	return m
}

// command is a line of the shell of root on the machine.
func (m *machine) command(line string) *exec.Cmd {
	cmd := exec.Command("nsenter", "--target", fmt.Sprint(m.pid), "--net", "--mount", "--uts", "--", "sh", "-c", "cd /var/lib\n"+line)
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/var/lib"}
	return cmd
}

// The first steps of docs/loadbalancer.md work as they stand there, on machines that have the addresses of the page; and the
// address is still answered for when the node that does so is killed.
func TestFirstStepsOfTheDocument(t *testing.T) {
	inParallel(t)
	text, err := os.ReadFile("../../docs/loadbalancer.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)<!-- run by test/lb/document_test.go -->\n```console\n(.*?)```").FindStringSubmatch(string(text))
	if block == nil {
		t.Fatal("docs/loadbalancer.md has no marked block")
	}
	network := testbed.NewNetwork(t)
	machines := map[string]*machine{}
	for name, addr := range map[string]string{"server": "192.0.2.10", "node1": "192.0.2.11", "node2": "192.0.2.12", "client": "192.0.2.9"} {
		machines[name] = newMachine(t, network, name, addr)
	}
	agents, commands, profile := map[string]*process.Process{}, 0, ""
	for line := range strings.Lines(block[1]) {
		name, command, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "$ ")
		m := machines[name]
		if m == nil {
			t.Fatalf("%q is no command on a machine", line)
		}
		commands++
		switch {
		case strings.HasPrefix(command, "fairlead server "):
			process.Start(t, m.command("exec "+command)).Says("join token")
		case strings.HasPrefix(command, "fairlead agent "):
			token := process.Output(t, machines["server"].command("cat /var/lib/fairlead/node-token")) // the page says to copy it
			process.Output(t, m.command("umask 077; echo "+token+" > node-token"))
			t.Cleanup(func() { process.Output(t, m.command("fairlead cleanup")) }) // of the Pods, too
			agents[name] = process.Start(t, m.command("exec "+command))
			agents[name].Says(`is up; DNS answers`)
		case strings.HasPrefix(command, "export "):
			profile += command + "\n"
		case name == "client":
			m.answers(command)
		default:
			t.Log(process.Output(t, m.command(profile+command)))
		}
	}
	if commands < 6 || len(agents) != 2 {
		t.Fatalf("%d commands were run, %d agents among them", commands, len(agents))
	}
	address := netip.MustParseAddr("192.0.2.100") // the first of the pool
	wire := listenOn(t, machines["client"].host)
	owner := ""
	testbed.Until(t, "an owner", func() error {
		mac, _ := wire.Who(address)
		for name := range agents {
			if arp.MACOf(t, machines[name].host, "eth0") == mac {
				owner = name
				return nil
			}
		}
		return errors.New("no node answers")
	})
	agents[owner].Kill()
	machines["client"].answers("curl -sS http://" + address.String())
}

// answers waits until a command prints something.
func (m *machine) answers(command string) {
	m.Helper()
	testbed.Until(m, command, func() error {
		out, err := process.Try(m.command("timeout 5 " + command))
		if err == nil && out == "" {
			err = errors.New("it has printed nothing")
		}
		return err
	})
}
