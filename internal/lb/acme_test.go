package lb

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	core "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/acme/nsupdate"
	"github.com/fairlead/fairlead/internal/lb/controller"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/nszone"
	"github.com/fairlead/fairlead/internal/testbed/pebble"
)

// A Service has a certificate ordered from a real authority, which the node that has the address answers: it is kept in the
// Secret that the Service names; a host of another namespace and a Secret that was not made for that are not used
// (RFC 8555, RFC 8737). Another Service without port 80 is verified there by
// HTTP-01, and a third one, whose name has a *, in its zone by DNS-01.
func TestACME(t *testing.T) {
	t.Parallel()
	vip := netip.MustParseAddr("127.77.1.1")
	if l, err := net.Listen("tcp", netip.AddrPortFrom(vip, 443).String()); errors.Is(err, os.ErrPermission) {
		t.Skip("needs the right to listen on port 443, where ACME asks; make test as root runs it")
	} else if err == nil {
		_ = l.Close()
	}
	plainVIP := netip.MustParseAddr("127.77.1.5")
	authority := pebble.Start(t, "shop.example", map[string]netip.Addr{
		"a.shop.example": vip, "b.shop.example": vip, "c.shop.example": netip.MustParseAddr("127.77.1.2"),
		"d.shop.example": plainVIP,
	}, nil)
	r := newRig(t)
	log := slog.New(slog.DiscardHandler)
	_, err := r.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "database"},
		Data: map[string][]byte{"password": []byte("x")}}, metav1.CreateOptions{})
	r.must(err)
	plain := r.acmeBalancer("plain", "d.shop.example", "plain-cert", plainVIP, dialect.HTTP01)
	r.acmeBalancer("wild", "*.e.shop.example,e.shop.example", "wild-cert", netip.MustParseAddr("127.77.1.6"), dialect.DNS01)
	o := r.acmeBalancer("web", "b.shop.example,a.shop.example", "web-cert", vip)
	r.acmeBalancer("thief", "www.bank.example", "thief-cert", netip.MustParseAddr("127.77.1.3"))
	r.acmeBalancer("grabber", "a.shop.example", "database", netip.MustParseAddr("127.77.1.4"))
	r.acmeBalancer("silent", "c.shop.example", "silent-cert", netip.MustParseAddr("127.77.1.2"))

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	r.acmeNode(ctx, &running, o, plain)
	own := kubernetes.NewForConfigOrDie(r.own)
	recorder := events.NewRecorder(own, corev1.EventSource{Component: "fairlead-lb"}, log)
	stop := recorder.Start()
	key, err := nsupdate.ParseKey(nszone.KeyFile)
	r.must(err)
	a := controller.ACME{
		Directory: authority.Directory, Email: "ops@shop.example", Roots: authority.Roots,
		Domains:     []acme.Domain{{Name: "shop.example", Namespaces: []string{"default"}}, {Name: "bank.example", Namespaces: []string{"bank"}}},
		Propagation: time.Second, Limits: acme.DefaultLimits(), Binding: acme.Binding{KeyID: pebble.KeyID, Key: pebble.Key()},
		DNS: nsupdate.New([]nsupdate.Zone{{Name: "shop.example", Servers: []string{authority.Zone.Addr}}}, key),
	}
	order := func() { a.Manager(own, log, recorder, func(*corev1.Service) bool { return true }).Run(ctx) }
	running.Go(order)

	first := ""
	testbed.Until(t, "a certificate that clients trust", func() (err error) { first, err = serial(ctx, authority.Issuer, vip); return err })
	secret, err := r.client.CoreV1().Secrets("default").Get(ctx, "web-cert", metav1.GetOptions{})
	r.must(err)
	if len(secret.Data) != 2 || secret.Type != corev1.SecretTypeTLS {
		t.Errorf("the Secret is of type %s, with %d entries", secret.Type, len(secret.Data))
	}
	want := []string{"grabber ACMESecretTaken", "plain ACMECertificateIssued", "silent ACMEOrderFailed",
		"thief ACMEHostNotAllowed", "web ACMECertificateIssued", "wild ACMECertificateIssued"}
	testbed.Until(t, "the Events", func() error {
		if got := slices.Compact(r.eventReasons()); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	if records, updates := authority.Zone.Records(); records != "" || updates != 4 {
		t.Errorf("after %d updates the zone has the records %q", updates, records)
	}
	failed, err := r.client.CoreV1().Secrets("default").Get(ctx, "silent-cert", metav1.GetOptions{})
	r.must(err)
	if failed.Annotations["fairlead.dev/acme-failures"] != "1" || len(failed.Data) != 2 {
		t.Errorf("%v, %d entries", failed.Annotations, len(failed.Data))
	}
	if s, err := r.client.CoreV1().Secrets("default").Get(ctx, "database", metav1.GetOptions{}); err != nil || len(s.Data) != 1 {
		t.Errorf("a Secret that the controller did not make: %v, %d entries", err, len(s.Data))
	}
	// The controllers may make the Secrets that the Service of a front of their namespace names, and no others.
	_, err = r.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "bank"}}, metav1.CreateOptions{})
	r.must(err)
	front := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "gateway", Annotations: map[string]string{
		svc.FrontOrdersAnnotation: "default/front-cert,bank/front-cert"}}}
	front.Spec = corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 80}}}
	_, err = r.client.CoreV1().Services("default").Create(ctx, front, metav1.CreateOptions{})
	r.must(err)
	ordered := core.Secret("front-cert", "default").WithType(corev1.SecretTypeOpaque)
	if _, err := own.CoreV1().Secrets("default").Apply(ctx, ordered, metav1.ApplyOptions{FieldManager: "x"}); err != nil {
		t.Errorf("a Secret that the Service of a front names: %v", err)
	}
	elsewhere := core.Secret("front-cert", "bank").WithType(corev1.SecretTypeOpaque)
	if _, err := own.CoreV1().Secrets("bank").Apply(ctx, elsewhere, metav1.ApplyOptions{FieldManager: "x"}); !apierrors.IsForbidden(err) {
		t.Errorf("a Secret of another namespace than the front's: %v", err)
	}
	other := core.Secret("other", "default").WithType(corev1.SecretTypeOpaque)
	if _, err := own.CoreV1().Secrets("default").Apply(ctx, other, metav1.ApplyOptions{FieldManager: "x"}); !apierrors.IsForbidden(err) {
		t.Errorf("a Secret that no Service names: %v", err)
	}
	// Another process goes on with what there is; a certificate that the authority wants to be renewed is replaced, without an end
	// of service.
	authority.Suggest(t, secret.Data[corev1.TLSCertKey])
	running.Go(order)
	testbed.Until(t, "another certificate", func() error {
		second, err := serial(ctx, authority.Issuer, vip)
		if err != nil {
			t.Errorf("while it is replaced: %v", err)
		} else if second == first {
			err = errors.New("the first one")
		}
		return err
	})
	if text := authority.Output(); strings.Count(text, "is a replacement of") != 1 {
		t.Error("the order does not replace the first certificate")
	}
	stop()
	cancel()
	running.Wait()
}

// serial returns the serial number of the certificate that clients of b.shop.example get.
func serial(ctx context.Context, roots *x509.CertPool, vip netip.Addr) (string, error) {
	d := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "b.shop.example"}}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(vip, 443).String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String(), nil
}

// acmeBalancer makes a Service of the proxied way that has a certificate ordered, with its address.
func (r *rig) acmeBalancer(name, hosts, secret string, at netip.Addr, challenge ...string) *corev1.Service {
	r.Helper()
	services := r.client.CoreV1().Services("default")
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{
		dialect.LBACMEHosts: hosts, dialect.LBTLSSecrets: secret}}}
	for _, c := range challenge {
		o.Annotations[dialect.LBACMEChallenge] = c
	}
	o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "tls", Port: 443}}
	o, err := services.Create(r.Context(), o, metav1.CreateOptions{})
	r.must(err)
	mode := corev1.LoadBalancerIPModeProxy
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: at.String(), IPMode: &mode}}
	o, err = services.UpdateStatus(r.Context(), o, metav1.UpdateOptions{})
	r.must(err)
	return o
}

// acmeNode has a node serve Services with their Secrets until ctx ends; nothing makes the address local here.
func (r *rig) acmeNode(ctx context.Context, running *sync.WaitGroup, services ...*corev1.Service) {
	log := slog.New(slog.DiscardHandler)
	f := front.New(front.Options{
		NodeName: "n1", Client: r.client, Log: log, Server: proxied.New(proxied.Options{Log: log, Engine: web.Start}),
		Events: events.NewRecorder(r.client, corev1.EventSource{Component: "fairlead-lb-speaker"}, log),
		Network: &front.Network{
			SetVIPs: func(_, _ []netip.Addr) error { return nil }, SetClusterIPs: func(_, _ []netip.Addr) error { return nil },
			ClusterIPs: func() ([]netip.Addr, error) { return nil, nil },
			Filter:     noFilter{}, Rules: noRules{},
		},
	})
	for _, o := range services {
		f.SetClaim(netip.MustParseAddr(o.Status.LoadBalancer.Ingress[0].IP), []svc.Name{svc.NameOf(o)})
		f.SetService(o)
	}
	running.Go(func() { f.Run(ctx) })
}

type noFilter struct{}

func (noFilter) SetBound([]netip.Addr, []filter.Bound) error { return nil }
func (noFilter) Close() error                                { return nil }
func (noFilter) Redirects() bool                             { return false }
func (noFilter) Firsts() bool                                { return false }
func (noFilter) Settle()                                     {}

type noRules struct{}

func (noRules) Set([]netip.Prefix, []filter.Group) error { return nil }
func (noRules) Close() error                             { return nil }

// eventReasons returns which Events there are, as NAME REASON; none has a private key.
func (r *rig) eventReasons() (out []string) {
	r.Helper()
	list, err := r.client.CoreV1().Events("default").List(r.Context(), metav1.ListOptions{})
	r.must(err)
	for _, e := range list.Items {
		out = append(out, e.InvolvedObject.Name+" "+e.Reason)
		if strings.Contains(e.Message, "PRIVATE KEY") {
			r.Errorf("%s", e.Message)
		}
	}
	slices.Sort(out)
	return out
}
