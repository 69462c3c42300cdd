package walk

import (
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/migrate/act"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
)

// withPassword are MetalLB's objects with a router whose password is in the Secret "router".
const withPassword = `
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p, namespace: metallb-system}, spec: {addresses: [192.0.2.0/24]}}
---
{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: b, namespace: metallb-system}, spec: {}}
---
{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: spine, namespace: metallb-system},
 spec: {myASN: 64512, peerASN: 64513, peerAddress: 10.0.0.1, passwordSecret: {name: router}}}
`

// secret is one of kube-system with the name that the peer's has.
func secret(ours bool, data map[string]string) *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: "fairlead-bgp-spine"}}
	if ours {
		s.Labels = map[string]string{metallb.PoolLabel: "true"}
	}
	s.Data = map[string][]byte{}
	for k, v := range data {
		s.Data[k] = []byte(v)
	}
	return s
}

// A password comes into a Secret of the migration's. One of that name that others have made is not written, and counts only with the
// same password; the way back removes only the migration's.
func TestCopyPasswords(t *testing.T) {
	for _, c := range []struct {
		name        string
		theirs, our map[string]string // of MetalLB's Secret, and of the one in kube-system, nil if there is none
		made        bool              // by a migration
		want        string            // a part of the error
		left        bool              // afterwards
	}{
		{"none", map[string]string{"password": "a"}, nil, false, "", false},
		{"of an earlier migration", map[string]string{"password": "a"}, map[string]string{"password": "old"}, true, "", false},
		{"foreign", map[string]string{"password": "a"}, map[string]string{"password": "b"}, false, "another password than MetalLB's", true},
		{"foreign, without the key", map[string]string{"password": "a"}, map[string]string{"token": "b"}, false, "another password", true},
		{"foreign, and the same", map[string]string{"password": "a"}, map[string]string{"password": "a"}, false, "", true},
		{"no key", map[string]string{"token": "a"}, nil, false, "MetalLB has no password for the Secret kube-system/fairlead-bgp-spine", false},
		{"no key, and a foreign one", map[string]string{}, map[string]string{"token": "b"}, false, "MetalLB has no password", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var have []runtime.Object
			if c.our != nil {
				have = append(have, secret(c.made, c.our))
			}
			client := fake.NewClientset(have...)
			in := &metallb.Cluster{Objects: []byte(withPassword), Speaker: &appsv1.DaemonSet{}, Controller: &appsv1.Deployment{}}
			in.Secrets = map[string]*corev1.Secret{"router": secret(false, c.theirs)}
			w := &Walk{Options: Options{Client: client}, plan: metallb.Decide(in)}
			w.act = &act.Cluster{Client: client, Timeout: time.Millisecond}
			err := nodes{w}.copyPasswords(t.Context())
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			got, getErr := client.CoreV1().Secrets(svc.SystemNamespace).Get(t.Context(), "fairlead-bgp-spine", metav1.GetOptions{})
			switch {
			case err == nil && (getErr != nil || string(got.Data["password"]) != "a"):
				t.Errorf("the Secret is %+v, %v", got, getErr)
			case err != nil && len(wrote(client)) > 0:
				t.Errorf("requests %v", wrote(client))
			}
			if err := w.removePasswords(t.Context()); err != nil {
				t.Error(err)
			}
			list, err := client.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
			if err != nil || c.left != (len(list.Items) > 0) {
				t.Errorf("left are %v, %v", list.Items, err)
			}
		})
	}
}
