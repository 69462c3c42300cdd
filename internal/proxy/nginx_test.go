package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/connecttime"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

const (
	dnsVIP = "10.96.0.53"
	// dnsPort is where the DNS servers listen.
	dnsPort = 5300
	// nginxRetry is when nginx's resolver sends a question again (resend_timeout in ngx_resolver.c).
	nginxRetry = 5 * time.Second
)

// resolverPorts are the ports of the Service of DNS, by the one of the nginx that asks there. Connect-time leaves port 53 to the rules,
// and translates the other one.
var resolverPorts = map[uint16]uint16{8053: 53, 8054: 5353}

// nginxResolves has nginx look a name up for each request, which is the first label of its path.
const nginxResolves = `daemon off;
master_process off;
pid DIR/pid;
error_log DIR/errors;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path DIR/body; proxy_temp_path DIR/proxy; fastcgi_temp_path DIR/fastcgi;
  uwsgi_temp_path DIR/uwsgi; scgi_temp_path DIR/scgi;
  server { listen 127.0.0.1:9000; return 200 ok; }
SERVERS
}
`

const nginxServer = `  server {
    listen 127.0.0.1:LISTEN;
    resolver VIP:PORT valid=1s ipv6=off;
    resolver_timeout 30s;
    location ~ ^/(?<name>[^/]+)$ { proxy_pass http://$name:9000/; }
  }
`

// nameServer is a Pod of DNS: each name has the address 127.0.0.1.
type nameServer struct {
	host string
	conn *net.UDPConn
	done chan struct{}

	mu    sync.Mutex
	dead  bool
	asked map[string]int // by the first letter of the name
}

func serveNames(n *onNode, host string) *nameServer {
	n.t.Helper()
	h := n.Host(host)
	s := &nameServer{host: host, done: make(chan struct{}), asked: map[string]int{}}
	s.conn = h.ListenUDP(netip.AddrPortFrom(h.Addr4(), dnsPort))
	go s.serve()
	n.t.Cleanup(s.close)
	return s
}

func (s *nameServer) serve() {
	defer close(s.done)
	for buf := make([]byte, 512); ; {
		size, from, err := s.conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		var q dns.Msg
		if err != nil || q.Unpack(buf[:size]) != nil || len(q.Question) != 1 || !s.answers(q.Question[0].Name[:1]) {
			continue
		}
		a := new(dns.Msg).SetReply(&q)
		header := dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}
		a.Answer = []dns.RR{&dns.A{Hdr: header, A: net.IPv4(127, 0, 0, 1)}}
		if b, err := a.Pack(); err == nil {
			_, _ = s.conn.WriteToUDPAddrPort(b, from)
		}
	}
}

func (s *nameServer) answers(letter string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[letter]++
	return !s.dead
}

// count is how many questions came for names that begin with a letter.
func (s *nameServer) count(letter string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[letter]
}

// die has the server answer nothing from now on, as a machine that is gone.
func (s *nameServer) die() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = true
}

func (s *nameServer) close() {
	_ = s.conn.Close()
	<-s.done
}

// lookUps are requests that nginx looks a name up for.
type lookUps struct {
	wg sync.WaitGroup

	mu      sync.Mutex
	open    map[string]time.Time // by name, when it began
	n, slow int
	longest time.Duration
	errs    []error
}

// askNginx has a look-up begin every 50 ms at each nginx, until ctx ends.
func (l *lookUps) askNginx(ctx context.Context, n *onNode) {
	for listen, port := range resolverPorts {
		l.wg.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ctx.Err() == nil; i++ {
				l.wg.Go(func() { l.one(n, listen, fmt.Sprintf("%s%d.test", letterOf(port), i)) })
				<-tick.C
			}
		})
	}
}

func letterOf(port uint16) string { return map[uint16]string{53: "r", 5353: "p"}[port] }

func (l *lookUps) one(n *onNode, listen uint16, name string) {
	begin := time.Now()
	l.mu.Lock()
	l.open[name] = begin
	l.mu.Unlock()
	err := getFrom(n, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), listen), name)
	took := time.Since(begin)
	if err == nil && took > 2*nginxRetry-time.Second {
		err = fmt.Errorf("answered after %s", took)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, name)
	l.n++
	l.longest = max(l.longest, took)
	if took > time.Second {
		l.slow++
	}
	if err != nil {
		l.errs = append(l.errs, fmt.Errorf("%s, asked at %s: %w", name, begin.Format("05.000"), err))
	}
}

// getFrom asks an nginx on the node.
func getFrom(n *onNode, at netip.AddrPort, name string) error {
	c, err := n.Node.Dial(context.Background(), svc.TCP, at)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := fmt.Fprintf(c, "GET /%s HTTP/1.0\r\n\r\n", name); err != nil {
		return err
	}
	b, err := io.ReadAll(c)
	if line, _, _ := strings.Cut(string(b), "\r\n"); err == nil && line != "HTTP/1.1 200 OK" {
		err = fmt.Errorf("nginx says %q", line)
	}
	return err
}

// settled waits until no look-up is open that began longer ago than age.
func (l *lookUps) settled(t *testing.T, age time.Duration) {
	t.Helper()
	testbed.Until(t, "look-ups to end", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for name, begin := range l.open {
			if took := time.Since(begin); took > age {
				return fmt.Errorf("%s is open for %s", name, took)
			}
		}
		return nil
	})
}

// While the only Pod of DNS is replaced a hundred times, nginx's resolver, which keeps its connected socket, loses no look-up for longer
// than it takes to send one again: neither at port 53, which the rules translate, nor at one that connect-time does. The same holds where
// Pods die before they are replaced.
func TestNginxResolvesWhileDNSIsReplaced(t *testing.T) {
	if _, err := exec.LookPath("nginx"); err != nil {
		t.Skip("no nginx: install it with test/setup.sh")
	}
	cfg := connect.Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
	n := runOnNode(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		m, err := connecttime.New(nft.Config{DropInvalid: true}, cfg, slog.New(slog.DiscardHandler))
		return made(t, m, err)
	}, false)
	n.dnsService()
	server := serveNames(n, "a")
	n.endpoints("kube-dns", n.at("a"))
	testbed.Until(t, "the Service", n.tracksOnlyPort53)
	n.startNginx()

	l := &lookUps{open: map[string]time.Time{}}
	ctx, stop := context.WithCancel(t.Context())
	defer func() {
		stop()
		l.wg.Wait()
	}()
	// reached waits until both nginx have asked a server.
	reached := func(s *nameServer) {
		t.Helper()
		testbed.Until(t, "questions at "+s.host, func() error {
			for _, port := range resolverPorts {
				if s.count(letterOf(port)) == 0 {
					return fmt.Errorf("none by port %d", port)
				}
			}
			return nil
		})
	}
	testbed.Until(t, "nginx", func() error {
		var errs []error
		for listen, port := range resolverPorts {
			errs = append(errs, getFrom(n, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), listen), letterOf(port)+".test"))
		}
		return errors.Join(errs...)
	})
	l.askNginx(ctx, n)
	hosts := []string{"a", "b", "d", "e"}
	const replacements, crashes = 100, 3
	var leaving *nameServer
	for i := 1; i <= replacements+crashes; i++ {
		l.settled(t, nginxRetry/2) // a question that was lost is not lost again
		old := server
		host := hosts[i%len(hosts)]
		server = serveNames(n, host)
		if i > replacements {
			asked := old.count("p")
			old.die()
			testbed.Until(t, "questions that nobody answers", func() error {
				if old.count("p") == asked {
					return errors.New("none")
				}
				return nil
			})
		}
		n.endpoints("kube-dns", n.at(host))
		reached(server)
		if i > replacements {
			l.settled(t, time.Second)
		}
		if leaving != nil {
			leaving.close()
		}
		leaving = old // its Pod has time to end
	}
	stop()
	l.wg.Wait()
	testbed.Until(t, "the Service, after all changes", n.tracksOnlyPort53)
	t.Logf("%d look-ups, %d of them took more than a second, the longest %s", l.n, l.slow, l.longest)
	for _, err := range l.errs {
		t.Error(err)
	}
	if l.n < replacements {
		t.Errorf("only %d look-ups", l.n)
	}
}

// tracksOnlyPort53 asks by both ports, and returns an error unless the rules translate port 53, and connect-time the other one.
func (n *onNode) tracksOnlyPort53() error {
	n.Node.ForgetConnections()
	for port, want := range map[uint16]bool{53: true, 5353: false} {
		at := netip.AddrPortFrom(netip.MustParseAddr(dnsVIP), port)
		c, err := n.Node.Dial(n.t.Context(), svc.UDP, at)
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(oneTry))
		_, _, err = new(dns.Client).ExchangeWithConn(new(dns.Msg).SetQuestion("x.test.", dns.TypeA), &dns.Conn{Conn: c})
		_ = c.Close()
		if err != nil {
			return err
		}
		if err := n.Node.Tracks(svc.UDP, at); (err == nil) != want {
			return fmt.Errorf("port %d is translated by the rules: %t", port, err == nil)
		}
	}
	return nil
}

// dnsService makes the Service of DNS, without endpoints.
func (n *onNode) dnsService() {
	n.t.Helper()
	meta := metav1.ObjectMeta{Namespace: "default", Name: "kube-dns", Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns"}}
	var ports []corev1.ServicePort
	var own []discoveryv1.EndpointPort
	for _, port := range resolverPorts {
		name := letterOf(port)
		ports = append(ports, corev1.ServicePort{Name: name, Protocol: corev1.ProtocolUDP, Port: int32(port)})
		own = append(own, discoveryv1.EndpointPort{Name: new(name), Protocol: new(corev1.ProtocolUDP), Port: new(int32(dnsPort))})
	}
	_, err := n.client.CoreV1().Services("default").Create(n.t.Context(), &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		ClusterIP: dnsVIP, ClusterIPs: []string{dnsVIP}, Ports: ports,
	}}, metav1.CreateOptions{})
	if err == nil {
		_, err = n.client.DiscoveryV1().EndpointSlices("default").Create(n.t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4, Ports: own,
		}, metav1.CreateOptions{})
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// startNginx starts nginx on the node until the test ends.
func (n *onNode) startNginx() {
	n.t.Helper()
	dir := n.t.TempDir()
	var servers strings.Builder
	for listen, port := range resolverPorts {
		servers.WriteString(strings.NewReplacer("LISTEN", fmt.Sprint(listen), "VIP", dnsVIP, "PORT", fmt.Sprint(port)).Replace(nginxServer))
	}
	text := strings.NewReplacer("DIR", dir, "SERVERS", servers.String()).Replace(nginxResolves)
	if err := os.WriteFile(filepath.Join(dir, "nginx.conf"), []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(n.t.Context()))
	cmd := n.Node.Command(ctx, "nginx", "-p", dir, "-c", filepath.Join(dir, "nginx.conf"))
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		stop()
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		stop()
		_ = cmd.Wait()
		if n.t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "errors"))
			n.t.Logf("nginx: %s\n%s", out.String(), b[max(0, len(b)-300):])
		}
	})
}
