package service

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/fairlead/fairlead/internal/registry/proxy"
)

// objects is the storage of one kind in a map.
type objects map[string]runtime.Object

func (o objects) Get(_ context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	if obj, ok := o[name]; ok {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(corev1.Resource("things"), name)
}

func TestProxyFindsPodsOnly(t *testing.T) {
	address := func(ip, pod, ns string) corev1.EndpointAddress {
		return corev1.EndpointAddress{IP: ip, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: pod, Namespace: ns}}
	}
	pod := func(ip string) *corev1.Pod {
		return &corev1.Pod{Status: corev1.PodStatus{PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}}
	}
	f := finder{
		objects{"web": &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80},
			{Name: "https", Port: 443}}}}},
		objects{
			"web": &corev1.Endpoints{Subsets: []corev1.EndpointSubset{
				{NotReadyAddresses: []corev1.EndpointAddress{address("10.244.0.9", "live", "ns")},
					Ports: []corev1.EndpointPort{{Name: "http", Port: 1}}},
				{
					Addresses: []corev1.EndpointAddress{
						{IP: "192.0.2.1"}, address("10.244.0.1", "gone", "ns"), address("10.244.0.2", "moved", "ns"),
						address("127.0.0.1", "loop", "ns"), address("10.244.0.5", "live", "other"),
						address("10.244.0.5", "live", "ns"),
					},
					Ports: []corev1.EndpointPort{{Name: "http", Port: 8080}},
				},
			}},
			"empty": &corev1.Endpoints{},
		},
		objects{"moved": pod("10.244.0.3"), "loop": pod("127.0.0.1"), "live": pod("10.244.0.5")},
	}
	ctx := genericrequest.WithNamespace(context.Background(), "ns")
	for _, c := range []struct {
		id, want string
		check    func(error) bool
	}{
		{"web:80", "10.244.0.5:8080", nil},
		{"web:http", "10.244.0.5:8080", nil},
		{"web", "", apierrors.IsServiceUnavailable},
		{"web:https", "", apierrors.IsServiceUnavailable},
		{"web:81", "", apierrors.IsServiceUnavailable},
		{"empty", "", apierrors.IsServiceUnavailable},
		{"none", "", apierrors.IsServiceUnavailable},
		{"none:80", "", apierrors.IsNotFound},
	} {
		for range 20 { // the choice is random
			scheme, name, port, _ := utilnet.SplitSchemeNamePort(c.id)
			got, err := f.find(ctx, proxy.Target{Scheme: scheme, Name: name, Port: port})
			if got != c.want || (c.check == nil) != (err == nil) || err != nil && !c.check(err) {
				t.Fatalf("%s: %q, %v, want %q", c.id, got, err, c.want)
			}
		}
	}
}
