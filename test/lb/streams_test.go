package lb

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// foreign are objects of a namespace that no listener is open to.
const foreign = `
apiVersion: gateway.networking.k8s.io/v1
kind: ListenerSet
metadata: {name: team, namespace: foreign}
spec:
  parentRef: {name: wires, namespace: default}
  listeners:
  - {name: https, port: 9443, protocol: HTTPS, hostname: foreign.example.com, tls: {certificateRefs: [{name: foreign-tls}]}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: team, namespace: foreign}
spec:
  parentRefs: [{kind: ListenerSet, name: team}]
  rules: [{filters: [{type: RequestRedirect, requestRedirect: {hostname: team.example.com}}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: TCPRoute
metadata: {name: db, namespace: foreign}
spec:
  parentRefs: [{name: wires, namespace: default, port: 5432}]
  rules: [{backendRefs: [{name: web, namespace: default, port: 80}]}]`

// streams checks the part of docs/gateway.md about connections, datagrams and ListenerSets, the statuses, and that another namespace
// gets no part of them.
func (f *frontDoor) streams() {
	f.Helper()
	f.vault()
	dns := f.net.Host("dns")
	at := netip.AddrPortFrom(dns.Addr4(), 5353)
	dns.ServeAs("dns", svc.UDP, at)
	f.slice("dns", "dns", corev1.ProtocolUDP, at)
	_, err := f.client.CoreV1().Namespaces().Create(f.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "foreign"}},
		metav1.CreateOptions{})
	f.must(err)
	f.secret("foreign", "foreign-tls", "foreign.example.com")
	f.apply(strings.TrimSpace(foreign))
	manifests, commands := f.document("gateway.md", "streams_test.go")
	f.apply(manifests)
	vip := f.programmed("wires")
	f.answers(vip, commands)
	testbed.Until(f, "an answer by UDP", func() error {
		ctx, cancel := context.WithTimeout(f.Context(), 2*time.Second)
		defer cancel()
		a, err := f.browser.Ask(ctx, svc.UDP, netip.AddrPortFrom(netip.MustParseAddr(vip), 53))
		if err == nil && a.Name != "dns" {
			err = fmt.Errorf("%+v", a)
		}
		return err
	})
	for _, host := range []string{"other.example.com", "vault.example.org"} { // no route is for these
		if out, err := f.curl("-s --resolve "+host+":443:192.0.2.100 -k https://"+host+"/", vip); err == nil {
			f.Errorf("%s: %q", host, out)
		}
	}
	f.streamStatuses()
	f.permission(vip)
}

// permission lets ListenerSets of another namespace attach, and takes that back.
func (f *frontDoor) permission(vip string) {
	f.Helper()
	const ask = "-s --resolve foreign.example.com:9443:192.0.2.100 --connect-timeout 3 --cacert ca.pem -o /dev/null -w %{redirect_url} " +
		"https://foreign.example.com:9443/x"
	closed := func() error {
		if out, err := f.curl(ask, vip); err == nil {
			return fmt.Errorf("a port of a ListenerSet that is not allowed answers %q", out)
		}
		return nil
	}
	f.must(closed())
	allow := func(from string) {
		_, err := f.api.Gateways("default").Patch(f.Context(), "wires", types.MergePatchType,
			[]byte(`{"spec":{"allowedListeners":{"namespaces":{"from":"`+from+`"}}}}`), metav1.PatchOptions{})
		f.must(err)
	}
	allow("All")
	f.answers(vip, [][2]string{{ask, "https://team.example.com:9443/x"}})
	record := gateway.ServiceOfSet(svc.Name{Namespace: "foreign", Name: "team"})
	testbed.Until(f, "the Service by which nodes may read the Secret", func() error {
		s, err := f.client.CoreV1().Services(record.Namespace).Get(f.Context(), record.Name, metav1.GetOptions{})
		if err == nil && (s.Annotations[svc.FrontSecretsAnnotation] != "foreign/foreign-tls" || s.Spec.ClusterIP != corev1.ClusterIPNone) {
			err = fmt.Errorf("%v, %+v", s.Annotations, s.Spec)
		}
		return err
	})
	allow("Same")
	testbed.Until(f, "the end of the ListenerSet's port", closed)
}

// vault is a Pod that ends TLS itself.
func (f *frontDoor) vault() {
	f.Helper()
	text, key := f.keyPair("vault.example.com")
	cert, err := tls.X509KeyPair(text, key)
	f.must(err)
	file, err := os.OpenFile(f.ca, os.O_APPEND|os.O_WRONLY, 0o600)
	f.must(err)
	_, err = file.Write(text)
	f.must(err)
	f.must(file.Close())
	host := f.net.Host("vault")
	var l net.Listener
	host.Do(func() { l = host.ListenTCP(netip.AddrPortFrom(host.Addr4(), 8443)) })
	tell := tells("vault")
	testbed.Serve(f, l, func(c net.Conn) {
		t := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})
		tell(t)
		_ = t.Close()
	})
	f.slice("vault", "tls", corev1.ProtocolTCP, netip.AddrPortFrom(host.Addr4(), 8443))
}

// streamStatuses checks what the objects report.
func (f *frontDoor) streamStatuses() {
	f.Helper()
	has := func(what string, list []metav1.Condition, kind string, status metav1.ConditionStatus, reason string) {
		f.Helper()
		if c := apimeta.FindStatusCondition(list, kind); c == nil || c.Status != status || c.Reason != reason {
			f.Errorf("%s: %+v, want %s %s", what, c, status, reason)
		}
	}
	ctx, get := f.Context(), metav1.GetOptions{}
	pass, err := f.api.TLSRoutes("default").Get(ctx, "vault", get)
	f.must(err)
	has("the TLSRoute", pass.Status.Parents[0].Conditions, "Accepted", metav1.ConditionTrue, "Accepted")
	tcp, err := f.api.TCPRoutes("default").Get(ctx, "cart", get)
	f.must(err)
	has("the TCPRoute", tcp.Status.Parents[0].Conditions, "ResolvedRefs", metav1.ConditionTrue, "ResolvedRefs")
	udp, err := f.api.UDPRoutes("default").Get(ctx, "dns", get)
	f.must(err)
	has("the UDPRoute", udp.Status.Parents[0].Conditions, "Accepted", metav1.ConditionTrue, "Accepted")
	set, err := f.api.Sets("default").Get(ctx, "team", get)
	f.must(err)
	has("the ListenerSet", set.Status.Conditions, "Programmed", metav1.ConditionTrue, "Programmed")
	other, err := f.api.Sets("foreign").Get(ctx, "team", get)
	f.must(err)
	has("a ListenerSet that is not allowed", other.Status.Conditions, "Accepted", metav1.ConditionFalse, "NotAllowed")
	route, err := f.api.TCPRoutes("foreign").Get(ctx, "db", get)
	f.must(err)
	has("a TCPRoute of another namespace", route.Status.Parents[0].Conditions, "Accepted", metav1.ConditionFalse, "NotAllowedByListeners")
	has("the same", route.Status.Parents[0].Conditions, "ResolvedRefs", metav1.ConditionFalse, "RefNotPermitted")
	g, err := f.api.Gateways("default").Get(ctx, "wires", get)
	f.must(err)
	if n := g.Status.AttachedListenerSets; n == nil || *n != 1 {
		f.Errorf("attached ListenerSets: %v, want 1", n)
	}
}
