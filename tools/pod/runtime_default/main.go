// Prints the seccomp profile that containerd gives a pod with seccompProfile RuntimeDefault and no capability, as
// "linux.seccomp" of the OCI runtime specification. The profile is containerd's own code.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func main() {
	pod := &specs.Spec{
		Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}, NoNewPrivileges: true},
		Linux:   &specs.Linux{},
	}
	if err := seccomp.WithDefaultProfile()(nil, nil, nil, pod); err != nil {
		fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(pod.Linux.Seccomp); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
