package podspec

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/svc"
)

// ParsePort reads "[NAME=]PORT[/PROTOCOL]", for example http=9376 or dns=53/udp. An
// error begins with the text in quotes.
func ParsePort(s string) (corev1.ContainerPort, error) {
	wrong := fmt.Errorf("%q: want [NAME=]PORT[/tcp|udp|sctp], for example http=9376", s)
	name, rest, named := strings.Cut(s, "=")
	if !named {
		name, rest = "", s
	}
	number, proto, _ := strings.Cut(rest, "/")
	port, err := strconv.ParseInt(number, 10, 32)
	protocol, perr := svc.ParseProtocol(strings.ToUpper(proto))
	if err != nil && !errors.Is(err, strconv.ErrRange) || perr != nil {
		return corev1.ContainerPort{}, wrong
	}
	if err != nil || port < 1 || port > math.MaxUint16 {
		return corev1.ContainerPort{}, fmt.Errorf("%q: the port %s is not one of 1 to 65535", s, number)
	}
	if errs := validation.IsValidPortName(name); named && len(errs) > 0 {
		return corev1.ContainerPort{}, fmt.Errorf("%q: the name %s", s, errs[0])
	}
	return corev1.ContainerPort{Name: name, ContainerPort: int32(port), Protocol: corev1.Protocol(protocol.String())}, nil
}

// ParseProbe reads "http://:PORT/PATH", "https://:PORT/PATH", "tcp://:PORT" or
// "exec:COMMAND" as a probe of every second; empty is none. An error begins with the
// text in quotes.
func ParseProbe(s string) (*corev1.Probe, error) {
	if s == "" {
		return nil, nil
	}
	probe := &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1}
	if command, ok := strings.CutPrefix(s, "exec:"); ok {
		probe.Exec = &corev1.ExecAction{Command: []string{"/bin/sh", "-c", command}}
		return probe, nil
	}
	wrong := fmt.Errorf("%q: want http://:PORT/PATH, https://:PORT/PATH, tcp://:PORT or exec:COMMAND", s)
	u, err := url.Parse(s)
	if err != nil || u.Port() == "" {
		return nil, wrong
	}
	number, err := strconv.ParseUint(u.Port(), 10, 16)
	switch {
	case err != nil || number == 0:
		return nil, fmt.Errorf("%q: the port %s is not one of 1 to 65535", s, u.Port())
	case u.User != nil:
		return nil, fmt.Errorf("%q: a probe has no user and no password", s)
	case u.Scheme == "tcp" && u.Path+u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("%q: what stands behind the port would have no effect", s)
	}
	port := intstr.FromInt32(int32(number))
	switch u.Scheme {
	case "http", "https":
		path := u.RequestURI()
		probe.HTTPGet = &corev1.HTTPGetAction{Path: path, Port: port, Host: u.Hostname(), Scheme: corev1.URIScheme(strings.ToUpper(u.Scheme))}
	case "tcp":
		probe.TCPSocket = &corev1.TCPSocketAction{Port: port, Host: u.Hostname()}
	default:
		return nil, wrong
	}
	return probe, nil
}
