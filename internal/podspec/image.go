package podspec

import (
	"fmt"

	"github.com/fairlead/fairlead/internal/svc"
)

// maxImage bounds how much of an image's name a message repeats.
const maxImage = 100

// CannotRun returns why nodes start no container of an image, "" if they do.
func CannotRun(image string) string {
	if image == svc.HostImage {
		return ""
	}
	return fmt.Sprintf("image %.*q is not supported: fairlead runs the machine's own programs, write image: %s and a command",
		maxImage, image, svc.HostImage)
}
