package node

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// postgres is a PostgreSQL server on a host. It does not run as root.
type postgres struct {
	t         *testing.T
	c         *cluster
	on        *testbed.Host
	bin, data string
}

// newPostgres returns a server of the newest version that is installed, without data.
func newPostgres(t *testing.T, c *cluster, on *testbed.Host) *postgres {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(found) == 0 {
		t.Fatalf("no PostgreSQL: test/setup.sh installs it (%v)", err)
	}
	dir, err := os.MkdirTemp("", "postgresql-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &postgres{t, c, on, filepath.Dir(slices.Max(found)), filepath.Join(dir, "data")}
	process.Output(t, exec.Command("chown", "postgres", dir))
	return p
}

// do runs one of its programs as its user, and returns what it says.
func (p *postgres) do(program string, args ...string) string {
	p.t.Helper()
	return process.Output(p.t, p.c.on(p.on, "runuser", append([]string{"-u", "postgres", "--", filepath.Join(p.bin, program)}, args...)...))
}

// start runs the server until the end of the test.
func (p *postgres) start() *process.Process {
	p.t.Helper()
	cmd := p.c.on(p.on, "setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", filepath.Join(p.bin, "postgres"),
		"-D", p.data, "-c", "listen_addresses=*", "-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "wal_receiver_status_interval=1")
	server := process.Start(p.t, cmd)
	testbed.Until(p.t, "PostgreSQL on "+p.on.Name(), func() error { _, err := p.ask("127.0.0.1", "select 1"); return err })
	return server
}

// ask asks the server at an address from this one's host.
func (p *postgres) ask(at, sql string) (string, error) {
	cmd := p.c.on(p.on, "psql", "-XAtq", "-h", at, "-U", "fairlead", "postgres", "-c", sql)
	cmd.Env = append(cmd.Env, "PGCONNECT_TIMEOUT=5")
	out, err := process.Try(cmd)
	return strings.TrimSpace(out), err
}

// Real programs behind Services, registered on nodes that have not started them.
func TestRegisteredPrograms(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	testPostgreSQL(t, c)
	testPrograms(t, c)
}

// examples/postgresql: the Service of the primary follows it to a replica that is promoted, and
// that for reads goes on.
func testPostgreSQL(t *testing.T, c *cluster) {
	second := c.network.Outside("second")
	second.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(second, "second")
	c.agentOn(second, "second")

	primary, replica := newPostgres(t, c, c.node), newPostgres(t, c, second)
	primary.do("initdb", "--no-sync", "--auth", "trust", "-U", "fairlead", "-D", primary.data)
	hba, err := os.OpenFile(filepath.Join(primary.data, "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hba.WriteString("host all fairlead 0.0.0.0/0 trust\nhost replication fairlead 0.0.0.0/0 trust\n"); err != nil {
		t.Fatal(err)
	}
	_ = hba.Close()
	first := primary.start()
	replica.do("pg_basebackup", "--no-sync", "-c", "fast", "-R", "-X", "stream", "-h", c.node.Addr4().String(), "-U", "fairlead",
		"-D", replica.data)
	replica.start()

	c.nodesReady(2)
	c.kubectl("apply", "-f", "../../examples/postgresql/services.yaml")
	for _, on := range []*testbed.Host{c.node, second} {
		process.Output(t, c.fairlead(c.server, "register", "-f", "../../examples/postgresql/postgresql.yaml", "--node", on.Name(),
			"--timeout", "0"))
	}
	address := func(name string) string {
		return netip.MustParseAddr(c.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}")).String()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.kubectl("get", "events,pods,endpointslices", "-o", "wide"))
		}
	})
	writes, reads := address("postgresql-primary"), address("postgresql-read")
	at := func(service, sql, want string) {
		t.Helper()
		testbed.Until(t, want+" by "+sql, func() error {
			got, err := replica.ask(service, sql)
			if err == nil && got != want {
				err = fmt.Errorf("%q", got)
			}
			return err
		})
	}
	at(writes, "select host(inet_server_addr())", c.node.Addr4().String())
	at(writes, "create table if not exists t (v int); truncate t; insert into t values (7); select pg_is_in_recovery()", "f")
	at(reads, "select host(inet_server_addr())", second.Addr4().String()) // in turn
	at("127.0.0.1", "select v from t", "7")                               // on the replica
	if out, err := replica.ask("127.0.0.1", "insert into t values (8)"); err == nil || !strings.Contains(out+err.Error(), "read-only") {
		t.Errorf("a write to the replica: %q, %v", out, err)
	}

	first.Kill()
	replica.do("pg_ctl", "promote", "-D", replica.data)
	begin := time.Now()
	at(writes, "insert into t values (9); select host(inet_server_addr())", second.Addr4().String())
	t.Logf("the Service had the new primary %s after its promotion", time.Since(begin).Round(time.Millisecond))
	at(reads, "select max(v) from t", "9")
}
