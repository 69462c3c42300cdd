package node

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The userspace mode in the real process: what docs/modes.md and docs/proxy.md
// describe of its Events, its metrics, its end and its restart, and of the rights
// that it needs.
func TestUserspaceMode(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "--mode", "userspace", "--userspace-drain-timeout", "15s",
		"--userspace-connect-timeout", "30s")
	at := c.backends()
	c.sctpIsRefused()
	c.metricsCount(at)
	c.restart(at, syscall.SIGTERM)
	c.restart(at, syscall.SIGKILL)
	c.agent.Stop()
	c.needsNetAdmin(at)
}

// behaviours 43, 176: the Events of a Service have the reason why its SCTP port
// does not answer.
func (c *cluster) sctpIsRefused() {
	c.t.Helper()
	c.kubectl("create", "-f", "testdata/sctp.yaml")
	testbed.Until(c.t, "an Event of the Service signal", func() error {
		out, err := c.try("describe", "service", "signal")
		if err == nil && (!strings.Contains(out, "FailedToProgramService") || !strings.Contains(out, "does not carry SCTP")) {
			err = errors.New(out)
		}
		return err
	})
	c.kubectl("delete", "service", "signal")
}

// metricsCount makes some connections, and finds them in the metrics.
func (c *cluster) metricsCount(at netip.AddrPort) {
	c.t.Helper()
	const requests = 20
	before := c.metrics()
	open := c.hold(at)
	for range requests {
		if err := c.ask(at); err != nil {
			c.t.Errorf("request: %v", err)
		}
	}
	after := c.metrics()
	for name, least := range map[string]float64{
		`connections_accepted_total`:  requests + 1,
		`bytes_total{to="endpoints"}`: requests * float64(len("GET / HTTP/1.1\r\n")),
		`bytes_total{to="clients"}`:   requests * float64(len("HTTP/1.1 200 OK\r\n")),
		`connections_failed_total`:    0,
		`connections_retried_total`:   0,
		`endpoint_failures_total`:     0,
		`accept_pauses_total`:         0,
		`failing_endpoints`:           0,
		`udp_flows`:                   0,
	} {
		name = "fairlead_userspace_" + name
		got, there := after[name]
		if !there || got-before[name] < least {
			c.t.Errorf("%s went from %g to %g (%t), want %g more", name, before[name], got, there, least)
		}
	}
	if n := after["fairlead_userspace_connections"]; n < 1 {
		c.t.Errorf("%g connections are open, want that of this test at least", n)
	}
	_ = open.Close()
}

// metrics are the values that the agent shows, by name and labels.
func (c *cluster) metrics() map[string]float64 {
	c.t.Helper()
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.node.Dial(ctx, svc.TCP, netip.MustParseAddrPort("127.0.0.1:10249"))
		},
	}}
	answer, err := client.Get("http://node/metrics")
	if err != nil {
		c.t.Fatal(err)
	}
	defer answer.Body.Close()
	out := map[string]float64{}
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		var v float64
		if _, err := fmt.Sscan(value, &v); err == nil {
			out[name] = v
		}
	}
	return out
}

// held is a connection that is kept open.
type held struct {
	net.Conn
	lines *bufio.Reader
}

// hold opens a connection and has a request answered on it.
func (c *cluster) hold(at netip.AddrPort) *held {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	conn, err := c.node.Dial(ctx, svc.TCP, at)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = conn.Close() })
	h := &held{conn, bufio.NewReader(conn)}
	if err := h.ask(); err != nil {
		c.t.Fatal(err)
	}
	return h
}

// ask sends a request and reads its answer.
func (h *held) ask() error {
	if err := h.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(h, "GET / HTTP/1.1\r\nHost: my-service\r\n\r\n"); err != nil {
		return err
	}
	answer, err := http.ReadResponse(h.lines, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// restart ends the agent by a signal and starts it again, while requests go on.
// What clients may see of that is in docs/modes.md: new connections are refused,
// never left without an answer, from the end of one process until the next one
// has programmed the Services. SIGTERM lets the open ones go on for a while;
// those of a process that is killed break.
func (c *cluster) restart(at netip.AddrPort, how syscall.Signal) {
	c.t.Helper()
	open := c.hold(at)
	l := c.load(at)
	defer l.stop()
	l.answered(20)
	ended := time.Now()
	c.agent.Signal(how)
	testbed.Until(c.t, "new connections to be refused", func() error {
		if err := c.ask(at); !testbed.Refused(err) {
			return fmt.Errorf("a new connection: %w", err)
		}
		return nil
	})
	if err := open.ask(); how == syscall.SIGTERM && err != nil {
		c.t.Errorf("%s: the open connection does not go on: %v", how, err)
	} else if how == syscall.SIGKILL && err == nil {
		c.t.Errorf("%s: the open connection goes on", how)
	}
	_ = open.Close()
	if err := c.agent.Wait(); how == syscall.SIGTERM && err != nil {
		c.t.Errorf("the agent ended with %v", err)
	}
	gone := time.Now()
	c.startAgent()
	c.agentUp()
	up := time.Now()
	l.answered(50)
	broken, asked := 0, l.stop()
	for _, f := range asked {
		switch {
		case f.err == nil:
		case f.ended.Before(ended) || f.began.After(up):
			c.t.Errorf("%s: a request failed while an agent was there: %v", how, f.err)
		case testbed.Refused(f.err):
		case f.began.Before(gone) && broke(f.err):
			broken++
			c.t.Logf("%s: %v after %v", how, f.err, f.began.Sub(ended))
		default:
			c.t.Errorf("%s: a request failed otherwise than docs/modes.md says: %v", how, f.err)
		}
	}
	// In the moment in which a listener closes, each client may be in its queue.
	if how == syscall.SIGTERM && broken > loadClients {
		c.t.Errorf("%s: %d of %d requests broke off", how, broken, len(asked))
	}
}

// broke reports whether err is what a client gets whose connection was open when its
// other end went.
func broke(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// loadClients is how many requests are under way at a time.
const loadClients = 2

// request is one of a load, and how it ended.
type request struct {
	began, ended time.Time
	err          error
}

// load are requests that go on until they are stopped, each on a connection of
// its own.
type load struct {
	c      *cluster
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	requests []request
	good     int
}

func (c *cluster) load(at netip.AddrPort) *load {
	ctx, cancel := context.WithCancel(c.t.Context())
	l := &load{c: c, cancel: cancel}
	for range loadClients {
		l.wg.Go(func() {
			pace := time.NewTicker(5 * time.Millisecond)
			defer pace.Stop()
			for ctx.Err() == nil {
				r := request{began: time.Now()}
				r.err = c.ask(at)
				r.ended = time.Now()
				l.mu.Lock()
				l.requests = append(l.requests, r)
				if r.err == nil {
					l.good++
				}
				l.mu.Unlock()
				<-pace.C
			}
		})
	}
	return l
}

// answered waits until n more requests were answered.
func (l *load) answered(n int) {
	l.c.t.Helper()
	good := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.good
	}
	goal := good() + n
	testbed.Until(l.c.t, "more answers", func() error {
		if now := good(); now < goal {
			return fmt.Errorf("%d of %d", now, goal)
		}
		return nil
	})
}

// stop ends the load and returns what was asked.
func (l *load) stop() []request {
	l.cancel()
	l.wg.Wait()
	return l.requests
}

// needsNetAdmin runs a proxy without the one capability that it needs: it reports
// that and ends. With that one alone it works.
func (c *cluster) needsNetAdmin(at netip.AddrPort) {
	c.t.Helper()
	admin, err := os.ReadFile(c.path("server/admin.kubeconfig"))
	if err != nil {
		c.t.Fatal(err)
	}
	admin = bytes.Replace(admin, []byte("127.0.0.1"), []byte(c.server.Addr4().String()), 1)
	if err := os.WriteFile(c.path("proxy.kubeconfig"), admin, 0o600); err != nil {
		c.t.Fatal(err)
	}
	proxy := func(rights ...string) *process.Process {
		args := append(rights, process.Program("fairlead"), "proxy", "--mode", "userspace",
			"--kubeconfig", c.path("proxy.kubeconfig"), "--node-name", c.node.Name())
		return process.Start(c.t, c.node.Command(context.Background(), "setpriv", args...))
	}
	without := proxy("--inh-caps", "-net_admin", "--bounding-set", "-net_admin")
	var exit *exec.ExitError
	if err := without.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		c.t.Errorf("without CAP_NET_ADMIN: %v, want exit code 1", err)
	}
	lines := strings.Split(strings.TrimSpace(without.Log()), "\n")
	last := lines[len(lines)-1]
	for _, word := range []string{"mode userspace", "CAP_NET_ADMIN", "run it as root", "AmbientCapabilities=CAP_NET_ADMIN"} {
		if !strings.Contains(last, word) {
			c.t.Errorf("without CAP_NET_ADMIN its last line is %q, without %q", last, word)
		}
	}

	with := proxy("--inh-caps", "-all,+net_admin", "--bounding-set", "-all,+net_admin")
	testbed.Until(c.t, "an answer by a proxy that has CAP_NET_ADMIN alone", func() error { return c.ask(at) })
	with.Stop()
}
