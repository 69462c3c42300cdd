package lb

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
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
	f.granted()
	f.must(f.api.Gateways("default").Delete(f.Context(), "wires", metav1.DeleteOptions{}))
	testbed.Until(f, "the status of a ListenerSet whose Gateway has gone", func() error {
		s, err := f.api.Sets("default").Get(f.Context(), "team", metav1.GetOptions{})
		if c := apimeta.FindStatusCondition(s.Status.Conditions, "Programmed"); err == nil && (c == nil || c.Reason != "ParentNotAccepted") {
			err = fmt.Errorf("Programmed is %+v", c)
		}
		return err
	})
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
	record := names.ServiceOfSet(svc.Name{Namespace: "foreign", Name: "team"})
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

// granted shows the certificate of another namespace while a ReferenceGrant there permits it.
func (f *frontDoor) granted() {
	f.Helper()
	f.apply(strings.TrimSpace(`
apiVersion: gateway.networking.k8s.io/v1
kind: ReferenceGrant
metadata: {name: certs, namespace: foreign}
spec:
  from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: default}]
  to: [{group: "", kind: Secret, name: foreign-tls}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: borrows}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: foreign-tls, namespace: foreign}]}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: borrows}
spec:
  parentRefs: [{name: borrows}]
  rules: [{filters: [{type: RequestRedirect, requestRedirect: {hostname: team.example.com}}]}]`))
	vip := f.programmed("borrows")
	const ask = "-s --resolve foreign.example.com:443:192.0.2.100 --connect-timeout 3 --cacert ca.pem -o /dev/null -w %{redirect_url} " +
		"https://foreign.example.com/x"
	f.answers(vip, [][2]string{{ask, "https://team.example.com/x"}})
	grant := svc.Name{Namespace: "foreign", Name: "certs"}
	record := names.ServiceOfGrant(grant)
	s, err := f.client.CoreV1().Services(record.Namespace).Get(f.Context(), record.Name, metav1.GetOptions{})
	f.must(err)
	if s.Annotations[svc.FrontSecretsAnnotation] != "foreign/foreign-tls" || s.Spec.ClusterIP != corev1.ClusterIPNone {
		f.Errorf("the Service by which nodes may read the Secret: %v, %+v", s.Annotations, s.Spec)
	}
	grants := f.dynamic.Resource(schema.GroupVersion(gwv1.GroupVersion).WithResource("referencegrants")).Namespace(grant.Namespace)
	f.must(grants.Delete(f.Context(), grant.Name, metav1.DeleteOptions{}))
	testbed.Until(f, "the certificate to be shown no longer", func() error {
		if out, err := f.curl(ask, vip); err == nil {
			return fmt.Errorf("it answers %q", out)
		}
		_, err := f.client.CoreV1().Services(record.Namespace).Get(f.Context(), record.Name, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("Service %s is still there: %w", record, err)
		}
		return nil
	})
	f.must(f.api.Gateways("default").Delete(f.Context(), "borrows", metav1.DeleteOptions{}))
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

// streamStatuses waits until the objects report what they should.
func (f *frontDoor) streamStatuses() {
	f.Helper()
	has := func(list []metav1.Condition, kind string, status metav1.ConditionStatus, reason string) error {
		if c := apimeta.FindStatusCondition(list, kind); c == nil || c.Status != status || c.Reason != reason {
			return fmt.Errorf("%s is %+v, want %s %s", kind, c, status, reason)
		}
		return nil
	}
	// of returns the conditions for the first parent: there are none before the controller has seen the route.
	of := func(parents []gwv1.RouteParentStatus) []metav1.Condition {
		if len(parents) == 0 {
			return nil
		}
		return parents[0].Conditions
	}
	ctx, get := f.Context(), metav1.GetOptions{}
	const yes, no = metav1.ConditionTrue, metav1.ConditionFalse
	for what, check := range map[string]func() error{
		"the TLSRoute": func() error {
			r, err := f.api.TLSRoutes("default").Get(ctx, "vault", get)
			return cmp.Or(err, has(of(r.Status.Parents), "Accepted", yes, "Accepted"))
		},
		"the TCPRoute": func() error {
			r, err := f.api.TCPRoutes("default").Get(ctx, "cart", get)
			return cmp.Or(err, has(of(r.Status.Parents), "ResolvedRefs", yes, "ResolvedRefs"))
		},
		"the UDPRoute": func() error {
			r, err := f.api.UDPRoutes("default").Get(ctx, "dns", get)
			return cmp.Or(err, has(of(r.Status.Parents), "Accepted", yes, "Accepted"))
		},
		"the ListenerSet": func() error {
			s, err := f.api.Sets("default").Get(ctx, "team", get)
			return cmp.Or(err, has(s.Status.Conditions, "Programmed", yes, "Programmed"))
		},
		"a ListenerSet that is not allowed": func() error {
			s, err := f.api.Sets("foreign").Get(ctx, "team", get)
			return cmp.Or(err, has(s.Status.Conditions, "Accepted", no, "NotAllowed"))
		},
		"a TCPRoute of another namespace": func() error {
			r, err := f.api.TCPRoutes("foreign").Get(ctx, "db", get)
			list := of(r.Status.Parents)
			return cmp.Or(err, has(list, "Accepted", no, "NotAllowedByListeners"), has(list, "ResolvedRefs", no, "RefNotPermitted"))
		},
		"the attached ListenerSets": func() error {
			g, err := f.api.Gateways("default").Get(ctx, "wires", get)
			if n := g.Status.AttachedListenerSets; err == nil && (n == nil || *n != 1) {
				err = fmt.Errorf("%v, want 1", n)
			}
			return err
		},
	} {
		testbed.Until(f, "the status of "+what, check)
	}
}
