package lb

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
)

const internalPool = "192.168.77.200-192.168.77.209"

// clouds are the manifests of examples/clouds, and what a client at $client gets from the Pod behind each.
var clouds = map[string]struct {
	way      dialect.Way
	internal bool
	want     string
}{
	"alibaba-ack": {dialect.Proxied, false, "proxy= for=$client proto=https"},
	"aws-classic": {dialect.Proxied, false, "proxy= for=$client proto=https"},
	"aws-nlb":     {dialect.Proxied, false, "proxy=$client for= proto="},
	"azure":       {dialect.Proxied, true, "proxy= for= proto="},
	"baidu-cce":   {dialect.Direct, true, "proxy= for= proto="},
	"fairlead":    {dialect.Proxied, false, "proxy= for=$client proto=https"},
	"google-gke":  {dialect.Direct, true, "proxy= for= proto="},
	"ibm":         {dialect.Proxied, false, "proxy= for= proto="},
	"metallb":     {dialect.Direct, false, "proxy= for= proto="},
	"openstack":   {dialect.Proxied, false, "proxy= for=$client proto=http"},
	"tencent-tke": {dialect.Proxied, false, "proxy= for= proto="},
}

// tell answers requests at a port of a Pod with what the load balancer says of the client.
func (c *cluster) tell(pod *testbed.Host, port uint16) {
	c.Helper()
	var l net.Listener
	pod.Do(func() { l = pod.ListenTCP(netip.AddrPortFrom(pod.Addr4(), port)) })
	testbed.Serve(c, l, func(conn net.Conn) {
		in, proxy := bufio.NewReader(conn), ""
		if head, err := in.Peek(16); err == nil && strings.HasPrefix(string(head), "\r\n\r\n\x00\r\nQUIT\n") {
			rest := make([]byte, 16+int(binary.BigEndian.Uint16(head[14:])))
			if _, err := io.ReadFull(in, rest); err != nil {
				return
			}
			if len(rest) >= 28 {
				proxy = netip.AddrFrom4([4]byte(rest[16:20])).String()
			}
		}
		for {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			body := fmt.Sprintf("proxy=%s for=%s proto=%s", proxy, r.Header.Get("X-Forwarded-For"), r.Header.Get("X-Forwarded-Proto"))
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
	})
}

// The manifests of examples/clouds do what they would in their clouds, for an outside client and for a Pod, whose
// connection does not go past the proxy either (behaviours 97, 106; examples of 107 to 149). No key is printed meanwhile.
func TestManifestsOfClouds(t *testing.T) {
	inParallel(t)
	files, err := filepath.Glob("../../examples/clouds/*.yaml")
	if err != nil || len(files) != len(clouds) {
		t.Fatalf("%d files, %v", len(files), err)
	}
	c := newCluster(t, clusterOptions{server: debugServer, agent: debugAgent}, "n1")
	testbed.Until(c, "the kind of pools", func() error {
		_, err = c.lb.Pools.Create(t.Context(), &v1.IPAddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: "internal"}, Spec: v1.IPAddressPoolSpec{Addresses: []string{internalPool}, Internal: true},
		}, metav1.CreateOptions{})
		return err
	})
	cert, key := c.keyPair("web.example.com")
	ca := filepath.Join(t.TempDir(), "ca.pem")
	c.must(os.WriteFile(ca, cert, 0o600))
	_, err = c.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "web-cert"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key},
	}, metav1.CreateOptions{})
	c.must(err)
	pod, caller := c.nodes[0].host.Pod("web"), c.nodes[0].host.Pod("caller")
	c.tell(pod, 8080)
	_, err = c.client.CoreV1().Nodes().Patch(t.Context(), "n1", types.MergePatchType, []byte(`{"metadata":{"labels":{"key":"value1"}}}`),
		metav1.PatchOptions{})
	c.must(err)
	services := map[string]*corev1.Service{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		c.must(err)
		s := &corev1.Service{}
		c.must(yaml.UnmarshalStrict(text, s))
		services[strings.TrimSuffix(filepath.Base(file), ".yaml")] = s
		_, err = c.client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{})
		c.must(err)
		_, err = c.client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: s.Name + "-test", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4().String()}, NodeName: new("n1")}},
			Ports:       []discoveryv1.EndpointPort{{Name: &s.Spec.Ports[0].Name, Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
		}, metav1.CreateOptions{})
		c.must(err)
	}
	for name, s := range services {
		want, known := clouds[name]
		r := claim.Read(s)
		if !known || r.Way != want.way {
			t.Errorf("%s takes the %s way, because of %v", name, r.Way, r.Because)
		}
		for _, f := range r.Findings {
			if f.State.IsWarning() || f.State == dialect.Unused && name != "baidu-cce" {
				t.Errorf("%s: %+v", name, f)
			}
		}
		vip := c.addressOf(s.Name, want.way)
		if internal := vip.Compare(netip.MustParseAddr("192.168.77.200")) >= 0; internal != want.internal {
			t.Errorf("%s has %s", name, vip)
		}
		for _, from := range []*testbed.Host{c.wire.Host(), caller} {
			testbed.Until(c, name+" from "+from.Name(), func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				port := fmt.Sprint(s.Spec.Ports[0].Port)
				out, err := from.Command(ctx, "curl", "--silent", "--show-error", "--noproxy", "*", "--cacert", ca, "--connect-to",
					"web.example.com:"+port+":"+vip.String()+":"+port, s.Spec.Ports[0].Name+"://web.example.com/").CombinedOutput()
				if text := strings.ReplaceAll(want.want, "$client", from.Addr4().String()); err != nil || string(out) != text {
					return fmt.Errorf("%s, %v; want %s", out, err, text)
				}
				return nil
			})
		}
	}
	rules, err := c.nodes[0].host.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-lb-rules").CombinedOutput()
	const rule = `"kubernetes.io/rule/nlb/client=default/aws-nlb"`
	if err != nil || !strings.Contains(string(rules), rule) || strings.Contains(string(rules), "classic") {
		t.Errorf("the rules of the Network Load Balancer: %v\n%s", err, rules)
	}
	c.keysStayOut()
}

// addressOf waits for the address of a Service with the ipMode of its way.
func (c *cluster) addressOf(name string, way dialect.Way) (vip netip.Addr) {
	c.Helper()
	mode := map[dialect.Way]corev1.LoadBalancerIPMode{dialect.Direct: "VIP", dialect.Proxied: "Proxy"}[way]
	testbed.Until(c, "the address of "+name, func() error {
		s, err := c.client.CoreV1().Services("default").Get(c.Context(), name, metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) == 0 || *s.Status.LoadBalancer.Ingress[0].IPMode != mode {
			return fmt.Errorf("%v, %v; want ipMode %s", s.Status.LoadBalancer.Ingress, err, mode)
		}
		vip = netip.MustParseAddr(s.Status.LoadBalancer.Ingress[0].IP)
		return nil
	})
	return vip
}
