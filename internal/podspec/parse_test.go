package podspec

import (
	"strconv"
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

// What a probe could not do is rejected, and not dropped.
func TestProbeRejected(t *testing.T) {
	for text, want := range map[string]string{
		"tcp://:80/path":      "what stands behind the port would have no effect",
		"tcp://:80?a=b":       "what stands behind the port would have no effect",
		"http://:80/a#b":      "what stands behind the port would have no effect",
		"http://u:p@:80/":     "a probe has no user and no password",
		"tcp://u@:80":         "a probe has no user and no password",
		"http://:65536/":      "the port 65536 is not one of 1 to 65535",
		"tcp://:0":            "the port 0 is not one of 1 to 65535",
		"udp://:80":           "want http://:PORT/PATH, https://:PORT/PATH, tcp://:PORT or exec:COMMAND",
		"tcp://:80000000000x": "want http://:PORT/PATH, https://:PORT/PATH, tcp://:PORT or exec:COMMAND",
	} {
		if p, err := ParseProbe(text); err == nil || err.Error() != strconv.Quote(text)+": "+want {
			t.Errorf("%s: %v, %v, want %q", text, p, err, want)
		}
	}
}
