package podspec

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestProbeForms(t *testing.T) {
	for text, check := range map[string]func(*corev1.Probe) bool{
		"tcp://:80":              func(p *corev1.Probe) bool { return p.TCPSocket != nil && p.TCPSocket.Port.IntVal == 80 },
		"https://:8443/ok?a=b":   func(p *corev1.Probe) bool { return p.HTTPGet.Scheme == "HTTPS" && p.HTTPGet.Path == "/ok?a=b" },
		"exec:test -e /run/done": func(p *corev1.Probe) bool { return p.Exec.Command[2] == "test -e /run/done" },
	} {
		p, err := ParseProbe(text)
		if err != nil || !check(p) {
			t.Errorf("%s: %v, %v", text, p, err)
		}
	}
}
