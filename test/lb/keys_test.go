package lb

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Flags of processes that log all they can, upload access logs to a server that is away, and order certificates from an
// authority that is away.
var (
	debugServer = []string{
		"--log-level", "debug", "--lb-acme-directory", "https://127.0.0.1:1/directory", "--lb-acme-domain", "example.com",
	}
	debugAgent = []string{"--log-level", "debug", "--lb-access-log-endpoint", "https://127.0.0.1:1"}
)

// keysStayOut checks that the keys of all Secrets of the cluster are in nothing that it prints: logs at level debug, Events, what
// the commands show, metrics, and the rules of the kernel.
func (c *cluster) keysStayOut() {
	c.Helper()
	c.useKeys()
	n := c.nodes[0]
	run := func(name string, args ...string) string {
		ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
		defer cancel()
		cmd := c.host.Command(ctx, name, args...)
		if name != process.Program("fairlead") {
			cmd = n.host.Command(ctx, name, args...)
		}
		cmd.Env = append(os.Environ(), "KUBECONFIG="+c.server.Kubeconfig)
		out, err := cmd.CombinedOutput()
		if err != nil || len(out) < 50 {
			c.Errorf("%s %s: %v\n%s", filepath.Base(name), strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	fairlead := func(args ...string) string { return run(process.Program("fairlead"), args...) }
	list, err := c.client.CoreV1().Events("").List(c.Context(), metav1.ListOptions{})
	c.must(err)
	all, err := json.Marshal(list)
	c.must(err)
	printed := map[string]string{
		"the node's log": n.Log(), "the server's log": c.server.Log(), "Events": string(all),
		"explain": fairlead("lb", "explain", "keys"), "explain -o json": fairlead("lb", "explain", "keys", "-o", "json"),
		"lb status": fairlead("lb", "status"), "lb status -o json": fairlead("lb", "status", "-o", "json"),
		"metrics":     run("curl", "--silent", "--show-error", "--noproxy", "*", "http://127.0.0.1:10249/metrics"),
		"the ruleset": run("nft", "list", "ruleset"),
	}
	if !strings.Contains(printed["the node's log"], "DEBUG") || !strings.Contains(printed["Events"], "ACMEOrderFailed") {
		c.Error("the node does not log at level debug, or nothing was ordered")
	}
	secrets, err := c.client.CoreV1().Secrets("").List(c.Context(), metav1.ListOptions{})
	c.must(err)
	looked := map[string]bool{}
	for i := range secrets.Items {
		s := &secrets.Items[i]
		for entry, value := range s.Data {
			parts := keyParts(entry, value)
			looked[s.Name] = looked[s.Name] || len(parts) > 0
			for where, text := range printed {
				for _, part := range parts {
					if strings.Contains(text, part) {
						c.Errorf("the entry %s of the Secret %s/%s is in %s", entry, s.Namespace, s.Name, where)
					}
				}
			}
		}
	}
	for _, name := range []string{"web-cert", "client-cert", "ordered-cert", "broken-cert", "bucket", "fairlead-lb-acme", "fairlead-lb"} {
		if !looked[name] {
			c.Errorf("the Secret %s has no key", name)
		}
	}
	for where, text := range printed {
		if strings.Contains(text, "PRIVATE KEY") {
			c.Errorf("a private key is in %s", where)
		}
	}
}

// keyParts returns what must not be printed of an entry of a Secret, as Go prints it, too: nothing of certificates.
func keyParts(entry string, value []byte) (out []string) {
	if entry == corev1.TLSCertKey || entry == "access-key-id" || strings.HasPrefix(entry, "usage-bootstrap") ||
		entry == "token-id" || entry == "expiration" || entry == "auth-extra-groups" || entry == "description" {
		return nil
	}
	der := value
	if block, _ := pem.Decode(value); block != nil {
		der = block.Bytes
		for _, line := range strings.Split(string(value), "\n") {
			if len(line) > 20 && !strings.HasPrefix(line, "-----") {
				out = append(out, line)
			}
		}
	}
	if len(der) < 16 {
		return out
	}
	// As bytes without the beginning, which all keys of a kind share, and without the end, which is the public key.
	inside := der[8:min(len(der), 60)]
	return append(out, string(inside), hex.EncodeToString(inside), base64.StdEncoding.EncodeToString(der),
		base64.URLEncoding.EncodeToString(der), base64.StdEncoding.EncodeToString(value))
}

// useKeys makes a Service that has keys of each kind used, and waits until they were.
func (c *cluster) useKeys() {
	c.Helper()
	cert, key := c.keyPair("client.example.com")
	other, _ := c.keyPair("other.example.com")
	for _, s := range []*corev1.Secret{
		{ObjectMeta: metav1.ObjectMeta{Name: "client-cert"}, Type: corev1.SecretTypeTLS,
			Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key}},
		{ObjectMeta: metav1.ObjectMeta{Name: "broken-cert"}, Type: corev1.SecretTypeTLS, // the key of another certificate
			Data: map[string][]byte{corev1.TLSCertKey: other, corev1.TLSPrivateKeyKey: key}},
		{ObjectMeta: metav1.ObjectMeta{Name: "bucket"}, Type: front.LogSecretType, Data: map[string][]byte{
			"access-key-id": []byte("AKIDEXAMPLE"), "secret-access-key": []byte("wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY")}},
	} {
		_, err := c.client.CoreV1().Secrets("default").Create(c.Context(), s, metav1.CreateOptions{})
		c.must(err)
	}
	c.service("keys", func(s *corev1.Service) {
		s.Annotations = map[string]string{
			"fairlead.dev/lb-protocol": "https", "fairlead.dev/lb-backend-protocol": "https",
			"fairlead.dev/lb-tls-secrets": "ordered-cert,web-cert,broken-cert", "fairlead.dev/lb-acme-hosts": "keys.example.com",
			"fairlead.dev/lb-backend-client-secret": "client-cert", "fairlead.dev/lb-access-log": "true",
			"fairlead.dev/lb-access-log-bucket": "logs", "fairlead.dev/lb-access-log-credentials": "bucket",
		}
		s.Spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443}}
	})
	c.event("keys", "ACMEOrderFailed")
	c.event("keys", "ProxiedLoadBalancerFailed") // of broken-cert
}
