package lb

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// keyPair makes a certificate for a name.
func (b *bed) keyPair(name string) (cert, key []byte) {
	b.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	b.must(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	b.must(err)
	text, err := x509.MarshalECPrivateKey(k)
	b.must(err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: text})
}

// backend answers HTTP requests with the line of the PROXY protocol that came before.
func (b *bed) backend(at *testbed.Host, port uint16) {
	b.Helper()
	var l net.Listener
	at.Do(func() { l = at.ListenTCP(netip.AddrPortFrom(at.Addr4(), port)) })
	testbed.Serve(b, l, func(c net.Conn) {
		in := bufio.NewReader(c)
		first, _ := in.ReadString('\n')
		for line := first; strings.TrimSpace(line) != ""; {
			line, _ = in.ReadString('\n')
		}
		body := strings.TrimSpace(first)
		_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body)
	})
}

// An outside client speaks TLS to the address; the node that answers for it ends that, and tells the
// Pod the client's address. Another node takes over, and a new certificate is used (behaviours 97,
// 115, 116, 119, 121, 173, 178).
func TestTLSAtALoadBalancer(t *testing.T) {
	inParallel(t)
	b := newBed(t, 2)
	cert, key := b.keyPair("web.example.com")
	secrets := b.client.CoreV1().Secrets("default")
	_, err := secrets.Create(b.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "web-cert"}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key},
	}, metav1.CreateOptions{})
	b.must(err)
	pod := b.net.Host("pod")
	b.backend(pod, 8080)
	name, port, proto := "https", int32(8080), corev1.ProtocolTCP
	_, err = b.client.DiscoveryV1().EndpointSlices("default").Create(b.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4().String()}}},
	}, metav1.CreateOptions{})
	b.must(err)
	const aws = "service.beta.kubernetes.io/aws-load-balancer-"
	vip := b.service("web", func(s *corev1.Service) {
		s.Annotations = map[string]string{
			aws + "ssl-cert": "arn:aws:acm:us-east-1:123456789012:certificate/web-cert", aws + "ssl-ports": "https", aws + "proxy-protocol": "*",
		}
		s.Spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443}}
	})[0]
	s, err := b.client.CoreV1().Services("default").Get(b.Context(), "web", metav1.GetOptions{})
	b.must(err)
	if mode := s.Status.LoadBalancer.Ingress[0].IPMode; mode == nil || *mode != corev1.LoadBalancerIPModeProxy {
		t.Errorf("ipMode %v", mode)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	b.must(os.WriteFile(ca, cert, 0o600))
	client := b.net.Outside("browser")
	curl := func() error {
		ctx, cancel := context.WithTimeout(b.Context(), 10*time.Second)
		defer cancel()
		out, err := client.Command(ctx, "curl", "--silent", "--show-error", "--noproxy", "*", "--cacert", ca, "--connect-to",
			"web.example.com:443:"+vip.String()+":443", "https://web.example.com/").CombinedOutput()
		want := "PROXY TCP4 " + client.Addr4().String() + " " + vip.String() + " "
		if err != nil || !strings.HasPrefix(string(out), want) {
			return fmt.Errorf("%s, %v; want %s", out, err, want)
		}
		return nil
	}
	testbed.Until(b, "the first answer", curl)
	for _, n := range b.nodes {
		n.host.Serve(svc.TCP, 22) // on all of its addresses
	}
	client.Do(func() {
		if c, err := net.DialTimeout("tcp", netip.AddrPortFrom(vip, 22).String(), testbed.Patience); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("another port of the address: %v, %v", c, err)
		}
	})
	owner := b.owner(vip, b.nodes...)
	b.voters(3)
	owner.Kill()
	testbed.Until(b, "an answer of the other node", curl)
	cert, key = b.keyPair("web.example.com")
	b.must(os.WriteFile(ca, cert, 0o600))
	secret, err := secrets.Get(b.Context(), "web-cert", metav1.GetOptions{})
	b.must(err)
	secret.Data = map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key}
	_, err = secrets.Update(b.Context(), secret, metav1.UpdateOptions{})
	b.must(err)
	testbed.Until(b, "the new certificate", curl)
	// A node that announces nothing serves what others route to it.
	silent := b.addNode("n3")
	silent.args.Announce = v1.AnnounceNone
	silent.start()
	client = b.net.Outside("routed")
	client.Route(netip.PrefixFrom(vip, vip.BitLen()), silent.host.Addr4())
	testbed.Until(b, "an answer of a node without announcements", curl)
	for _, n := range b.nodes {
		if log := n.Log(); strings.Contains(log, strings.Split(string(key), "\n")[1]) || strings.Contains(log, "PRIVATE KEY") {
			t.Errorf("%s: a private key is in the log", n.name)
		}
	}
}
