package servers

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditapi "k8s.io/apiserver/pkg/apis/audit/v1"

	several "github.com/fairlead/fairlead/internal/apiserver/members"
	serverstore "github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// TestEmbeddedMembers: several servers with embedded etcds, from the first that was alone to the
// replacement of one that is lost.
func TestEmbeddedMembers(t *testing.T) {
	n := testbed.NewNetwork(t)
	begin := time.Now()
	stage := func(what string) { t.Logf("%s after %s", what, time.Since(begin).Round(10*time.Millisecond)) }
	all := form(t, n)
	stage("three servers")
	for i, m := range all {
		name := fmt.Sprintf("by-%s", m.name)
		testbed.Until(t, "a write through "+m.name, func() error { return m.write(t, name) })
		for _, o := range all {
			o.has(t, name)
		}
		all[i].has(t, "alone")
	}
	testbed.Until(t, "all servers in default/kubernetes", func() error { return endpointsAre(t, all[0], all...) })
	stage("all see all")
	stopTogether(t, all)
	stage("all have stopped at the same moment, and are back")
	losePower(t, 1, all...)
	stage("all have lost power, and are back")
	stopAlone(t, all)
	stage("one has started and stopped without the others")
	killLeader(t, all)
	stage("one killed, and back")
	slowMember(t, all)
	stage("one was slow, as a follower and as the leader")
	rejected(t, n, all[0])
	stage("all rejected")
	attacked(t, all[0])
	stage("all attacks failed")
	replace(t, all)
	stage("one replaced")
	lose(t, all)
	stage("restored after the loss of two of three")
}

// form makes three servers out of one that was alone, by the commands of docs/install.md.
func form(t *testing.T, n *testbed.Network) []*member {
	t.Helper()
	all := []*member{newMember(t, n, "server1").start(t), newMember(t, n, "server2"), newMember(t, n, "server3")}
	first := all[0]
	if err := first.write(t, "alone"); err != nil {
		t.Fatal(err)
	}
	first.Stop()
	files := t.TempDir()
	addresses := strings.NewReplacer("192.0.2.11", first.host.Addr4().String(), "192.0.2.12", all[1].host.Addr4().String(),
		"192.0.2.13", all[2].host.Addr4().String(), "-file server", "-file "+files+"/server")
	for _, line := range page(t) {
		name, command, _ := strings.Cut(line, "# fairlead ")
		m := all[slices.IndexFunc(all, func(m *member) bool { return m.name == name })]
		command, file, prints := strings.Cut(addresses.Replace(command), " > ")
		args := strings.Fields(command)
		switch {
		case prints:
			if err := os.WriteFile(filepath.Join(files, file), []byte(m.must(t, args...)), 0o600); err != nil {
				t.Fatal(err)
			}
		case args[0] == "server" && strings.HasPrefix(args[1], "--"):
			m.with(args[1:]...).start(t)
		default:
			t.Log(m.must(t, args...))
		}
	}
	awaitMembers(t, all)
	return all
}

// awaitMembers waits until the servers, and no other, count and are up to date.
func awaitMembers(t *testing.T, all []*member) {
	t.Helper()
	testbed.Until(t, fmt.Sprintf("%d servers that count and are up to date", len(all)), func() error {
		list, err := all[0].list(t)
		if err != nil {
			return err
		}
		leaders := 0
		for _, m := range all {
			x := list[m.name]
			if x.Role == several.RoleLeader {
				leaders++
			}
			if x.Role == several.RoleLearner || x.Status == nil || x.Server != m.url() || x.Lag == nil {
				return fmt.Errorf("%+v", x)
			}
		}
		if len(list) != len(all) || leaders != 1 {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
}

// page returns the commands of docs/install.md that are marked as run by this test.
func page(t *testing.T) []string {
	t.Helper()
	_, rest, found := strings.Cut(read(t, "../../docs/install.md"), "<!-- run by test/servers/members_test.go -->\n```console\n")
	block, _, ended := strings.Cut(rest, "\n```")
	if !found || !ended {
		t.Fatal("docs/install.md has no marked commands")
	}
	return strings.Split(block, "\n")
}

// stopTogether stops all servers at the same moment: the leader finds nobody to hand over to.
func stopTogether(t *testing.T, all []*member) {
	t.Helper()
	begin := time.Now()
	for _, m := range all {
		m.Signal(syscall.SIGTERM)
	}
	for _, m := range all {
		if err := m.Wait(); err != nil {
			t.Errorf("%s ended with %v", m.name, err)
		}
		if took := time.Since(begin); took > 6*time.Second { // etcd's own wait for its successor is 7 s
			t.Errorf("%s took %s to stop together with the others", m.name, took)
		}
	}
	for _, m := range all {
		m.with().Start(t)
	}
	for _, m := range all {
		m.AwaitReady(t)
	}
}

// stopAlone starts a server without the others, for which it waits and says so, and ends it again.
func stopAlone(t *testing.T, all []*member) {
	t.Helper()
	for _, m := range all {
		m.Kill()
	}
	first := all[0].with()
	first.Start(t)
	first.Says("waiting for other servers: more than half must be up")
	begin := time.Now()
	if first.Stop(); time.Since(begin) > 20*time.Second { // etcd's own end would wait until the others are there
		t.Errorf("a server that waits for others took %s to stop", time.Since(begin))
	}
	for _, m := range all {
		m.with().Start(t)
	}
	for _, m := range all {
		m.AwaitReady(t)
	}
}

// killLeader kills the leader and has it come back.
func killLeader(t *testing.T, all []*member) {
	t.Helper()
	list, err := all[0].list(t)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(m *member) bool { return list[m.name].Role == several.RoleLeader })
	leader, others := all[i], slices.Delete(slices.Clone(all), i, i+1)
	leader.Kill()
	begin := time.Now()
	testbed.Until(t, "a write without the leader", func() error { return others[0].write(t, "without-leader") })
	t.Logf("the first write is done %s after the leader was killed", time.Since(begin).Round(10*time.Millisecond))
	others[1].has(t, "without-leader")
	testbed.Until(t, "the killed server to leave default/kubernetes", func() error { return endpointsAre(t, others[0], others...) })
	t.Logf("it left default/kubernetes after %s", time.Since(begin).Round(10*time.Millisecond))

	// Two of three remain: neither may go, and no other server may join.
	if _, err := others[0].run(t, "server", "remove", others[1].name); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("the removal that would lose the quorum: %v", err)
	}
	leader.with().start(t) // without --cluster-init and --join
	leader.has(t, "without-leader")
}

// leaderOf returns which of the servers leads.
func leaderOf(t *testing.T, all []*member) (leader int) {
	t.Helper()
	testbed.Until(t, "a leader", func() error {
		for _, m := range all {
			list, err := m.list(t)
			if err != nil {
				return err
			}
			if leader = slices.IndexFunc(all, func(m *member) bool { return list[m.name].Role == several.RoleLeader }); leader >= 0 {
				return nil
			}
		}
		return errors.New("none")
	})
	return leader
}

// slowMember has each fsync of one server take longer, and writes through the other two.
func slowMember(t *testing.T, all []*member) {
	t.Helper()
	const writes = 20
	timed := func(what string, through []*member) time.Duration {
		begin, slowest := time.Now(), time.Duration(0)
		for i := range writes {
			name, one := fmt.Sprintf("%s-%d", what, i), time.Now()
			testbed.Until(t, "a write", func() error { return through[i%len(through)].write(t, name) })
			slowest = max(slowest, time.Since(one))
		}
		t.Logf("%s: %d writes through two servers in %s, the slowest in %s", what, writes, time.Since(begin).Round(time.Millisecond),
			slowest.Round(time.Millisecond))
		return time.Since(begin)
	}
	split := func() (leader *member, others []*member) {
		i := leaderOf(t, all)
		return all[i], slices.Delete(slices.Clone(all), i, i+1)
	}
	// yields writes until a slow leader has given the leadership away, and then writes at the usual pace.
	yields := func(what string, leader *member, others []*member) {
		t.Helper()
		begin := time.Now()
		testbed.Until(t, "another leader than "+leader.name, func() error {
			name := fmt.Sprint(what, "-", time.Since(begin).Milliseconds())
			if err := others[0].write(t, name); err != nil {
				return err
			}
			if now, _ := split(); now == leader {
				return errors.New("it leads")
			}
			return nil
		})
		t.Logf("%s: another one leads after %s", what, time.Since(begin).Round(10*time.Millisecond))
		if took := timed(what+"-no-longer", others); took > writes*time.Second/2 {
			t.Errorf("with a slow server that leads no more, %d writes through the others take %s", writes, took)
		}
	}
	leader, others := split()
	timed("no-disk-is-slow", others)

	end := process.SlowDisk(t, others[0].Process, time.Second)
	if took := timed("a-follower-is-slow", []*member{leader, others[1]}); took > writes*time.Second/2 {
		t.Errorf("with a follower whose fsync takes a second, %d writes through the others take %s", writes, took)
	}
	end()

	leader, others = split()
	end = process.SlowDisk(t, leader.Process, time.Second/5)
	yields("the-leader-is-a-little-slow", leader, others)
	end()

	// The second server that is slow does not give the leadership back to the first.
	first := leader
	leader, others = split()
	end = process.SlowDisk(t, leader.Process, time.Second/2)
	yields("the-next-is-a-little-slow", leader, others)
	for line := range strings.Lines(leader.Log()) {
		if strings.Contains(line, "another server leads now") && strings.Contains(line, first.name) {
			t.Errorf("the leadership was given to one that was too slow a moment ago: %s", line)
		}
	}
	end()

	// From the election timeout on the others elect one.
	leader, others = split()
	end = process.SlowDisk(t, leader.Process, 2*time.Second)
	yields("the-leader-is-slow", leader, others)
	end()
}

// replace removes a server that runs, and has it join again.
func replace(t *testing.T, all []*member) {
	t.Helper()
	stays, gone := all[0], all[2]
	_, err := stays.run(t, "server", "remove", gone.name, "--wipe")
	if err == nil || !strings.Contains(err.Error(), "on the machine of "+gone.name) {
		t.Errorf("the removal that deletes data of another machine: %v", err)
	}
	tries := 0
	testbed.Until(t, "the removal of a server, the others being up for some seconds", func() error {
		_, err := stays.run(t, "server", "remove", gone.name)
		if tries++; tries > 1 && err != nil && strings.Contains(err.Error(), "no server") {
			return nil // the answer of an earlier removal was lost
		}
		return err
	})
	if err := gone.Wait(); exitCode(err) != 3 || !strings.Contains(gone.Log(), "was removed from its cluster under the name "+gone.name) {
		t.Errorf("the removed server ended with %v: %s", err, gone.Log())
	}
	testbed.Until(t, "the removed server to leave default/kubernetes", func() error { return endpointsAre(t, stays, all[:2]...) })
	gone.Start(t)
	if err := gone.Wait(); exitCode(err) != 3 {
		t.Errorf("the removed server, started again, ends with %v; want 3", err)
	}
	if out := gone.must(t, "server", "remove", gone.name, "--wipe"); !strings.Contains(out, "are deleted") || serverstore.HasData(gone.dir) {
		t.Errorf("the data of the removed server is still there: %s", out)
	}
	token := stays.token(t)
	gone.with("--join", stays.url(), "--token-file", token).start(t)
	gone.has(t, "without-leader")
	by := "system:server-token:" + strings.Split(read(t, token), ".")[2]
	audited(t, stays, map[string]auditEntry{
		"the keys":    {several.JoinPath + "bundle", "post", by, gone.host.Addr4().String(), gone.name},
		"the member":  {several.JoinPath + "add", "post", by, gone.host.Addr4().String(), gone.name},
		"the removal": {several.Path + "/" + gone.name, "delete", "fairlead-admin", "", ""},
	})
	metrics, err := stays.Client.RESTClient().Get().AbsPath("/metrics").Do(t.Context()).Raw()
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []string{"keys", "added", "removed"} {
		counted := regexp.MustCompile(`fairlead_server_changes_total\{change="` + change + `"\} [1-9]`)
		if !counted.Match(metrics) {
			t.Errorf("/metrics counts no %s", change)
		}
	}
}

// auditEntry is what counts here of a line of an audit log.
type auditEntry struct{ uri, verb, user, from, server string }

// audited checks that the audit log of a server has all of want; an empty from may be any.
func audited(t *testing.T, m *member, want map[string]auditEntry) {
	t.Helper()
	testbed.Until(t, "the audit log of "+m.name, func() error {
		var have []auditEntry
		for line := range strings.Lines(read(t, m.auditLog())) {
			var e auditapi.Event
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				return err
			}
			uri, _, _ := strings.Cut(e.RequestURI, "?")
			have = append(have, auditEntry{uri, e.Verb, e.User.Username, strings.Join(e.SourceIPs, " "), e.Annotations["fairlead.dev/server"]})
		}
		for what, w := range want {
			if !slices.ContainsFunc(have, func(h auditEntry) bool {
				if w.from == "" {
					h.from = ""
				}
				return h == w
			}) {
				return fmt.Errorf("it lacks %s (%+v)", what, w)
			}
		}
		return nil
	})
}

// exitCode is that of a process, -1 if it has none.
func exitCode(err error) int {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return -1
	}
	return exit.ExitCode()
}

// lose loses two of three servers, and begins with a backup of the third.
func lose(t *testing.T, all []*member) {
	t.Helper()
	last := all[2]
	testbed.Until(t, "the server that joined to have a vote", func() error {
		if list, err := last.list(t); err != nil || list[last.name].Role == several.RoleLearner {
			return fmt.Errorf("%+v, %w", list, err)
		}
		return nil
	})
	all[0].Kill()
	all[1].Kill()
	testbed.Until(t, "/readyz to name the loss", func() error {
		got, err := last.Client.RESTClient().Get().AbsPath("/readyz/etcd-quorum").Do(t.Context()).Raw()
		if err == nil || !strings.Contains(string(got), "fewer than 2 of the 3 servers ([server1 server2 server3]) reach each other") {
			return fmt.Errorf("%s, %w", got, err)
		}
		return nil
	})
	list, err := last.list(t)
	if err != nil || len(list) != 3 || list["server1"].Status != nil || list["server3"].Status == nil {
		t.Errorf("the members without a quorum: %+v, %v", list, err)
	}
	last.Kill()
	if list, err := last.list(t, "--local"); err == nil {
		t.Errorf("a server that is down lists %v", list)
	}
	file := filepath.Join(t.TempDir(), "backup.tar")
	last.must(t, "backup", file)
	last.dir = filepath.Join(t.TempDir(), "restored")
	last.must(t, "restore", file)
	last.with("--cluster-init").start(t)
	last.has(t, "without-leader")
	if err := os.RemoveAll(all[0].dir); err != nil {
		t.Fatal(err)
	}
	all[0].with("--join", last.url(), "--token-file", last.token(t)).start(t)
	all[0].has(t, "alone")
	// One that has missed all this is of another cluster, and is not heard.
	all[1].Start(t)
	all[1].Says("waiting for other servers")
	if list, err := last.list(t); err != nil || len(list) != 2 {
		t.Errorf("the members after the restore: %+v, %v", list, err)
	}
	all[1].Kill()
}

// endpointsAre reports how the endpoints of default/kubernetes differ from the servers.
func endpointsAre(t *testing.T, through *member, want ...*member) error {
	t.Helper()
	slices, err := through.Client.DiscoveryV1().EndpointSlices("default").List(t.Context(),
		metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=kubernetes"})
	if err != nil {
		return err
	}
	var have []string
	for _, s := range slices.Items {
		for _, e := range s.Endpoints {
			have = append(have, e.Addresses...)
		}
	}
	for _, m := range want {
		if !strings.Contains(strings.Join(have, " ")+" ", m.host.Addr4().String()+" ") {
			return fmt.Errorf("%v lacks %s", have, m.name)
		}
	}
	if len(have) != len(want) {
		return fmt.Errorf("%v, want %d servers", have, len(want))
	}
	return nil
}
