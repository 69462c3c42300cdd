package lb

import (
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
)

// policies checks the part of docs/gateway.md about TLS to backends. While the authority cannot be used, no request reaches the
// backend, and the status has the reason. Without the policy, requests go in plain text, which the Pod refuses.
func (f *frontDoor) policies(vip string) {
	f.Helper()
	manifests, commands := f.document("gateway.md", "backendtls_test.go")
	f.apply(manifests)
	const code = "-s --resolve safe.example.com:80:192.0.2.100 -o /dev/null -w %{http_code} http://safe.example.com/"
	status := func(accepted, resolved string) {
		f.Helper()
		testbed.Until(f, "the status of the policy", func() error {
			p, err := f.api.Policies("default").Get(f.Context(), "vault", metav1.GetOptions{})
			if err != nil || len(p.Status.Ancestors) != 1 {
				return fmt.Errorf("%+v, %v", p.Status, err)
			}
			for kind, want := range map[string]string{"Accepted": accepted, "ResolvedRefs": resolved} {
				if c := apimeta.FindStatusCondition(p.Status.Ancestors[0].Conditions, kind); c == nil || c.Reason != want {
					return fmt.Errorf("%s is %+v, want %s", kind, c, want)
				}
			}
			return nil
		})
	}
	status("NoValidCACertificate", "InvalidCACertificateRef")
	f.answers(vip, [][2]string{{code, "503"}})
	text, err := os.ReadFile(f.ca)
	f.must(err)
	maps := f.client.CoreV1().ConfigMaps("default")
	ca := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "vault-ca"}, Data: map[string]string{"ca.crt": string(text)}}
	_, err = maps.Create(f.Context(), ca, metav1.CreateOptions{})
	f.must(err)
	status("Accepted", "ResolvedRefs")
	f.answers(vip, commands)
	ca.Data["ca.crt"] = "garbage"
	_, err = maps.Update(f.Context(), ca, metav1.UpdateOptions{})
	f.must(err)
	f.answers(vip, [][2]string{{code, "503"}})
	status("NoValidCACertificate", "InvalidCACertificateRef")
	ca.Data["ca.crt"] = string(text)
	_, err = maps.Update(f.Context(), ca, metav1.UpdateOptions{})
	f.must(err)
	f.answers(vip, commands)
	f.must(f.api.Policies("default").Delete(f.Context(), "vault", metav1.DeleteOptions{}))
	f.answers(vip, [][2]string{{code, "502"}})
}
