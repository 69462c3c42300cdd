package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// loadBalancer is a Service without node ports.
func loadBalancer(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: new(false),
		Ports: []corev1.ServicePort{{Name: "http", Port: servicePort, TargetPort: intstr.FromInt32(backendPort)}},
	}}
}

// create makes a Service of type LoadBalancer with one endpoint, and returns when the API has
// published its address.
func (s *balancers) create(ctx context.Context, name string, endpoint uint32) (vip netip.AddrPort, err error) {
	api := s.client.DiscoveryV1().EndpointSlices(benchNamespace)
	_, err = api.Create(ctx, endpointSlice(name, 0, []netip.Addr{endpointAddr(endpoint)}), metav1.CreateOptions{})
	if err != nil {
		return vip, err
	}
	if err := s.bare(ctx, name); err != nil {
		return vip, err
	}
	return s.address(ctx, name)
}

// bare creates a Service of type LoadBalancer without endpoints.
func (s *balancers) bare(ctx context.Context, name string) error {
	_, err := s.client.CoreV1().Services(benchNamespace).Create(ctx, loadBalancer(name), metav1.CreateOptions{})
	return err
}

// address waits for the address of a Service.
func (s *balancers) address(ctx context.Context, name string) (vip netip.AddrPort, err error) {
	p := s.controller
	if p == nil {
		p = s.lbs[0]
	}
	err = waitFor(ctx, time.Minute, time.Millisecond, p, func() error {
		got, err := s.client.CoreV1().Services(benchNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(got.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("service %s has no address", name)
		}
		a, err := netip.ParseAddr(got.Status.LoadBalancer.Ingress[0].IP)
		vip = netip.AddrPortFrom(a, servicePort)
		return err
	})
	return vip, err
}

// answered waits until the client outside gets an answer from an address.
func (s *balancers) answered(ctx context.Context, vip netip.AddrPort) (at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = s.outside.on(func() (err error) {
		at, err = until(ctx, vip, time.Millisecond, func(netip.Addr) bool { return true })
		return err
	})
	return at, err
}

// served creates Services one after the other, and returns in milliseconds how long after
// the begin of each the client outside had its first answer.
func (s *balancers) served(ctx context.Context, n int) (took []float64, last netip.AddrPort, err error) {
	for i := range n {
		begin := time.Now()
		if last, err = s.create(ctx, fmt.Sprintf("served-%d", i), uint32(i)); err != nil {
			return took, last, err
		}
		at, err := s.answered(ctx, last)
		if err != nil {
			return took, last, err
		}
		took = append(took, milliseconds.in(at.Sub(begin)))
	}
	return took, last, nil
}

// owner returns the host that the client outside knows for an address, nil if none.
func (s *balancers) owner(ctx context.Context, a netip.Addr) (int, error) {
	for i, h := range s.hosts {
		var mac string
		err := h.on(func() error {
			link, err := net.InterfaceByName("eth0")
			if err == nil {
				mac = link.HardwareAddr.String()
			}
			return err
		})
		if err != nil {
			return 0, err
		}
		out, err := exec.CommandContext(ctx, "ip", "-n", s.outside.name, "neigh", "show", "to", a.String()).Output()
		if err != nil {
			return 0, err
		}
		if strings.Contains(string(out), mac) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no node is known to have %s", a)
}
