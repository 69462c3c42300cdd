package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// makeDatagramService makes a Service of UDP with one endpoint.
func makeDatagramService(ctx context.Context, a *api, endpoint netip.AddrPort) (netip.AddrPort, error) {
	const name = "datagrams"
	got, err := a.client.CoreV1().Services(benchNamespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: benchNamespace},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "udp", Port: servicePort, Protocol: corev1.ProtocolUDP}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	slice := endpointSlice(name, 0, []netip.Addr{endpoint.Addr()})
	port, udp, portName := int32(endpoint.Port()), corev1.ProtocolUDP, "udp"
	slice.Ports[0].Port, slice.Ports[0].Protocol, slice.Ports[0].Name = &port, &udp, &portName
	if _, err := a.client.DiscoveryV1().EndpointSlices(benchNamespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return netip.AddrPort{}, err
	}
	vip, err := netip.ParseAddr(got.Spec.ClusterIP)
	return netip.AddrPortFrom(vip, servicePort), err
}

// serveDatagrams sends every datagram back, from the address that it came to.
func serveDatagrams(h *host, at netip.AddrPort) (io.Closer, error) {
	var c *net.UDPConn
	err := h.on(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		b := make([]byte, messageSize)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return c, nil
}

// datagrams has n clients make a socket for each question, and wait for the answer.
func (l load) datagrams(ctx context.Context, n int, d time.Duration, connected bool) (rate, error) {
	to := &unix.SockaddrInet4{Port: int(l.to.Port()), Addr: l.to.Addr().As4()}
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		b := make([]byte, messageSize)
		return func() error { return l.question(to, b, connected) }, func() {}, nil
	})
}

// question asks once.
func (l load) question(to *unix.SockaddrInet4, b []byte, connected bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(loadTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	send := func() error { return unix.Sendto(fd, b, 0, to) }
	if connected {
		if err := unix.Connect(fd, to); err != nil {
			return fmt.Errorf("%s: %w", l.to, err)
		}
		send = func() error { return writeAll(fd, b) }
	}
	if err := retryEINTR(send); err != nil {
		return fmt.Errorf("%s: %w", l.to, err)
	}
	var from unix.Sockaddr
	err = retryEINTR(func() (err error) { _, from, err = unix.Recvfrom(fd, b, 0); return err })
	if err != nil {
		return fmt.Errorf("%s: %w", l.to, err)
	}
	if is, ok := from.(*unix.SockaddrInet4); !ok || is.Addr != to.Addr || is.Port != to.Port {
		return errors.New("an answer is not from " + l.to.String())
	}
	return nil
}
